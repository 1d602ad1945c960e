// What joins a FusedElementwise, what does not, and that the graph computes the same bits after.
#include "parallel/passes/elementwise_fusion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "graph/evaluator.h"
#include "graph/fused_elementwise.h"
#include "graph/graph_builder.h"
#include "graph/verifier.h"
#include "tests/support/tolerance.h"

namespace trainrt {
namespace {

using Names = std::vector<std::string>;

Tensor draw(Shape shape, int salt) {
  std::vector<float> data(static_cast<size_t>(num_elements(shape)));
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<float>((i * 7919 + static_cast<size_t>(salt) * 131) % 1009) / 504.5f - 1;
  }
  return Tensor::from(data, shape);
}

class Fused {
 public:
  // All nodes of `graph` in one phase.
  explicit Fused(Graph graph, Backend backend = Backend::kCuda) {
    local.graph = std::move(graph);
    phases.push_back({PhaseKind::kForward, 0, {}, {}, {}});
    phases[0].nodes.resize(static_cast<size_t>(local.graph.num_nodes()));
    std::iota(phases[0].nodes.begin(), phases[0].nodes.end(), 0);
    fuse_elementwise(local, phases, backend);
    verify(local.graph, "after fusion");
  }

  // The operators in their order, the steps of fused ones as "Mul+Add".
  Names ops() const {
    Names names;
    for (const NodeId id : phases[0].nodes) {
      const Node& node = local.graph.node(id);
      std::string name = node.op_type;
      if (name == kFusedElementwise) {
        name.clear();
        for (const FusedStep& step : FusedExpression::of(node.attributes).steps) {
          name += (name.empty() ? "" : "+") + step.op_type;
        }
      }
      names.push_back(name);
    }
    return names;
  }

  TrainingGraph local;
  std::vector<Phase> phases;
};

class ElementwiseFusionTest : public ::testing::Test {
 protected:
  ValueId input(Shape shape) { return b_.constant(draw(std::move(shape), salt_++)); }
  // What is left of the operators that make these values, each of which is summed by a reader.
  Names fused(const std::vector<ValueId>& values) {
    graph_.outputs().clear();
    for (const ValueId value : values) {
      graph_.outputs().push_back(b_.reduce_sum(value, {0}));
    }
    Names ops = Fused(graph_).ops();
    std::erase(ops, "ReduceSum");
    return ops;
  }
  Graph graph_;
  GraphBuilder b_{graph_};
  int salt_ = 1;
};

TEST_F(ElementwiseFusionTest, AGatedLayerMultipliesInOneKernel) {
  const ValueId x = input({6, 8});
  const ValueId gate = b_.matmul(x, input({8, 16}));
  const ValueId open = b_.op("Swish", {gate});
  const ValueId up = b_.matmul(x, input({8, 16}));
  EXPECT_EQ(fused({b_.matmul(b_.mul(open, up), input({16, 8}))}),
            (Names{"MatMul", "MatMul", "Swish+Mul", "MatMul"}));
}

TEST_F(ElementwiseFusionTest, ASumIsRectifiedInOneKernel) {
  EXPECT_EQ(fused({b_.op("Relu", {b_.add(input({2, 3, 4}), input({2, 3, 4}))})}),
            Names{"Add+Relu"});
}

TEST_F(ElementwiseFusionTest, CastsAndBroadcastOperandsJoin) {
  const ValueId x = b_.cast(input({4, 8}), DType::kBFloat16);
  const ValueId bias = b_.cast(input({8}), DType::kBFloat16);
  const ValueId y = b_.mul(b_.add(x, bias), b_.scalar(0.5, DType::kBFloat16));
  const Names ops = fused({b_.cast(y, DType::kFloat32)});
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "Cast+Add+Mul+Cast"), 1);
  EXPECT_EQ(std::count(ops.begin(), ops.end(), "Cast"), 1);  // of the bias, of another shape
}

TEST_F(ElementwiseFusionTest, CpuProgramsStayAsTheyAre) {
  const ValueId x = b_.op("Tanh", {b_.add(input({4}), input({4}))});
  graph_.outputs() = {x};
  EXPECT_EQ(Fused(graph_, Backend::kCpu).ops(), (Names{"Add", "Tanh"}));
}

TEST_F(ElementwiseFusionTest, WhatGoesWithAProductIsLeftToIt) {
  const ValueId x = input({4, 8}), w = input({8, 8});
  const Attributes tanh = {{"approximate", std::string("tanh")}};
  const ValueId gelu = b_.op("Gelu", {b_.matmul(x, w)}, tanh);
  const ValueId relu = b_.op("Relu", {b_.matmul(x, w)});
  EXPECT_EQ(fused({b_.op("Exp", {b_.add(gelu, relu)})}),
            (Names{"MatMul", "Gelu", "MatMul", "Relu", "Add+Exp"}));
}

TEST_F(ElementwiseFusionTest, ExactGeluHasNoProductThatTakesIt) {
  const ValueId gelu = b_.op("Gelu", {b_.matmul(input({4, 8}), input({8, 8}))});
  EXPECT_EQ(fused({b_.mul(gelu, input({4, 8}))}), (Names{"MatMul", "Gelu+Mul"}));
}

TEST_F(ElementwiseFusionTest, AResultThatOthersReadIsAnOutput) {
  const ValueId x = input({4, 8});
  const ValueId y = b_.op("Exp", {x});
  const ValueId z = b_.op("Tanh", {b_.op("Neg", {y})});
  graph_.outputs() = {b_.reduce_sum(y, {0, 1}), b_.reduce_sum(z, {0, 1})};
  const Fused result(graph_);
  ASSERT_EQ(result.ops(), (Names{"Exp+Neg+Tanh", "ReduceSum", "ReduceSum"}));
  const Node& node = result.local.graph.node(result.phases[0].nodes[0]);
  EXPECT_EQ(node.outputs.size(), 2u);
  EXPECT_EQ(node.inputs.size(), 1u);
  EXPECT_EQ(inplace_of(node).size(), 2u);  // either may lie over the input
}

TEST_F(ElementwiseFusionTest, NodesWithAWayAroundThemStayApart) {
  const ValueId y = b_.op("Exp", {input({8, 8})});
  const ValueId product = b_.matmul(y, input({8, 8}));
  EXPECT_EQ(fused({b_.add(y, product)}), (Names{"Exp", "MatMul", "Add"}));
}

TEST_F(ElementwiseFusionTest, TwoGroupsNeverWaitForEachOther) {
  // Exp and Add could join, and so could Neg and Mul, but not both pairs.
  const ValueId a = b_.op("Exp", {input({8, 8})}), c = b_.op("Neg", {input({8, 8})});
  const ValueId to_add = b_.matmul(c, input({8, 8})), to_mul = b_.matmul(a, input({8, 8}));
  const Names ops = fused({b_.add(a, to_add), b_.mul(c, to_mul)});
  EXPECT_EQ(ops.size(), 5u);
}

TEST_F(ElementwiseFusionTest, ResultsThatAreKeptAreNodesOfTheirOwn) {
  const ValueId y = b_.op("Exp", {input({4})});
  graph_.outputs() = {y, b_.op("Neg", {y})};
  EXPECT_EQ(Fused(graph_).ops(), (Names{"Exp", "Neg"}));
}

// Random graphs: the same values, by name, with the same bits, from fewer nodes.
TEST(ElementwiseFusionPropertyTest, GraphsComputeTheSameBits) {
  int64_t nodes = 0, kept = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    Graph graph;
    GraphBuilder b(graph);
    std::vector<ValueId> values = {
        b.constant(draw({6, 6}, 1)), b.constant(draw({6, 6}, 2)), b.constant(draw({6}, 3))};
    const auto any = [&] { return values[random() % values.size()]; };
    const auto near = [&] { return values[values.size() - 1 - random() % 4 % values.size()]; };
    for (int i = 0; i < 40; ++i) {
      switch (random() % 8) {
        case 0:
          values.push_back(b.matmul(b.add(near(), values[0]), values[1]));
          break;
        case 1:
          values.push_back(b.op("Softmax", {near()}));
          break;
        case 2:
          values.push_back(b.op("Tanh", {near()}));
          break;
        case 3:
          values.push_back(b.add(b.reduce_sum(near(), {0}), values[0]));
          break;
        case 4:
          values.push_back(b.op("LeakyRelu", {near()}, {{"alpha", 0.25}}));
          break;
        default:
          values.push_back(b.op(random() % 2 == 0 ? "Add" : "Sub", {near(), any()}));
      }
    }
    std::vector<std::string> names;
    for (int i = 0; i < 3; ++i) {
      graph.outputs().push_back(b.reduce_sum(near(), {0}));
      names.push_back(graph.value(graph.outputs().back()).name);
    }
    const std::vector<Tensor> expected = evaluate(graph, {}, graph.outputs());
    const Fused fused(graph);
    const std::vector<Tensor> actual = evaluate(fused.local.graph, {}, fused.local.graph.outputs());
    for (size_t i = 0; i < names.size(); ++i) {
      EXPECT_TRUE(testing::tensors_identical(actual[i], expected[i])) << names[i];
    }
    nodes += graph.num_nodes();
    kept += fused.local.graph.num_nodes();
  }
  EXPECT_LT(kept, nodes * 3 / 4);
}

}  // namespace
}  // namespace trainrt
