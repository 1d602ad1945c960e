// Fusions: a small graph as exporters write it becomes the one operator, and keeps its values and
// gradients.
#include "graph/passes/fusion.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "graph/autodiff.h"
#include "graph/evaluator.h"
#include "graph/verifier.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

class FusionTest : public ::testing::Test {
 protected:
  ValueId parameter(const std::string& name, Shape shape, double scale = 1) {
    Value value;
    value.name = name;
    value.type = {DType::kFloat64, shape};
    value.kind = ValueKind::kParameter;
    std::vector<double> data(static_cast<size_t>(num_elements(shape)));
    for (size_t i = 0; i < data.size(); ++i) {
      data[i] = scale * (static_cast<double>((i * 7919 + feeds_.size() * 37) % 101) / 50.0 - 1.0);
    }
    feeds_[name] = Tensor::from(data, shape);
    parameters_.push_back(graph_.add_value(value));
    return parameters_.back();
  }

  ValueId scalar(double value) { return b_.scalar(value, DType::kFloat64); }

  int count(const Graph& graph, const std::string& op_type) const {
    return static_cast<int>(
        std::count_if(graph.nodes().begin(), graph.nodes().end(), [&](const Node& node) {
          return node.op_type == op_type;
        }));
  }

  // y and its gradients with respect to all parameters, under a fixed upstream gradient.
  std::vector<Tensor> values_and_gradients(Graph graph) const {
    const ValueId y = graph.outputs().at(0);
    const TensorType type = graph.value(y).type;
    std::vector<double> seed(static_cast<size_t>(num_elements(type.shape)));
    for (size_t i = 0; i < seed.size(); ++i) {
      seed[i] = std::cos(static_cast<double>(i));
    }
    const ValueId upstream = graph.add_constant("upstream", Tensor::from(seed, type.shape));
    std::vector<ValueId> wanted;
    for (const auto& [name, tensor] : feeds_) {
      wanted.push_back(graph.find_value(name).value());
    }
    std::vector<ValueId> fetches = differentiate(graph, {y}, {upstream}, wanted);
    std::erase(fetches, kNoValue);  // of parameters that the graph does not use
    fetches.push_back(y);
    return evaluate(graph, feeds_, fetches, {.reference_kernels = true, .step = {}});
  }

  // Fuses a copy; it must consist of nothing but `op_type` (and what is listed), once.
  Graph expect_fused(ValueId y, const std::string& op_type, int nodes_left = 1) {
    graph_.outputs() = {y};
    Graph fused = graph_;
    run_fusions(fused);
    verify(fused, "after fusion");
    EXPECT_EQ(count(fused, op_type), 1);
    EXPECT_EQ(fused.num_nodes(), nodes_left);
    const std::vector<Tensor> expected = values_and_gradients(graph_);
    const std::vector<Tensor> actual = values_and_gradients(fused);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(tensors_near(actual[i], expected[i], 1e-10)) << "result " << i;
    }
    return fused;
  }

  Graph graph_;
  GraphBuilder b_{graph_};
  std::map<std::string, Tensor> feeds_;
  std::vector<ValueId> parameters_;
};

TEST_F(FusionTest, NineNodeLayerNormBecomesOneOperator) {
  const ValueId x = parameter("x", {3, 4, 8});
  const Attributes last = {{"axes", std::vector<int64_t>{-1}}, {"keepdims", int64_t{1}}};
  const ValueId d = b_.sub(x, b_.op("ReduceMean", {x}, last));
  const ValueId variance = b_.op("ReduceMean", {b_.op("Pow", {d, scalar(2)})}, last);
  const ValueId normalized = b_.div(d, b_.op("Sqrt", {b_.add(variance, 1e-5)}));
  const ValueId y = b_.add(b_.mul(normalized, parameter("scale", {8})), parameter("bias", {8}));
  expect_fused(y, "LayerNormalization");
}

TEST_F(FusionTest, RmsNormWithReciprocalBecomesOneOperator) {
  const ValueId x = parameter("x", {3, 4, 8});
  const Attributes last = {{"axes", std::vector<int64_t>{2}}, {"keepdims", int64_t{1}}};
  const ValueId square = b_.op("ReduceMean", {b_.mul(x, x)}, last);
  const ValueId inverse = b_.op("Reciprocal", {b_.op("Sqrt", {b_.add(square, 1e-6)})});
  expect_fused(b_.mul(parameter("scale", {8}), b_.mul(x, inverse)), "RMSNormalization");
}

// As PyTorch's exporter writes it; two reshapes of the parameters stay.
TEST_F(FusionTest, InstanceNormalizationOfReshapedGroupsBecomesGroupNorm) {
  const ValueId x = parameter("x", {2, 6, 3, 5});
  const auto per_group = [&](double value) {
    return b_.constant(Tensor::from(std::vector<double>(2, value), {2}));
  };
  const ValueId normalized = b_.op("GroupNorm",
                                   {b_.reshape(x, {2, 2, 45}), per_group(1), per_group(0)},
                                   {{"num_groups", int64_t{2}}, {"epsilon", 1e-3}});
  const ValueId scaled =
      b_.mul(b_.reshape(normalized, {2, 6, 3, 5}), parameter("scale", {6, 1, 1}));
  const Graph fused =
      expect_fused(b_.add(scaled, parameter("bias", {6, 1, 1})), "GroupNorm", /*nodes_left=*/3);
  const auto norm = std::find_if(fused.nodes().begin(), fused.nodes().end(), [](const Node& node) {
    return node.op_type == "GroupNorm";
  });
  EXPECT_EQ(fused.value(norm->inputs[0]).name, "x");
}

TEST_F(FusionTest, ErfFormOfGeluBecomesOneOperator) {
  const ValueId x = parameter("x", {5, 7}, 3);
  const ValueId erf = b_.op("Erf", {b_.div(x, scalar(std::sqrt(2.0)))});
  Graph fused = expect_fused(b_.mul(b_.mul(x, b_.add(erf, 1.0)), 0.5), "Gelu");
  EXPECT_EQ(fused.node(0).attributes.get_string("approximate"), "none");
}

TEST_F(FusionTest, TanhFormOfGeluBecomesOneOperator) {
  const ValueId x = parameter("x", {5, 7}, 3);
  const ValueId cube = b_.mul(b_.op("Pow", {x, scalar(3)}), 0.044715);
  const ValueId tanh =
      b_.op("Tanh", {b_.mul(b_.add(x, cube), std::sqrt(2 / 3.14159265358979323846))});
  Graph fused = expect_fused(b_.mul(b_.mul(x, 0.5), b_.add(tanh, 1.0)), "Gelu");
  EXPECT_EQ(fused.node(0).attributes.get_string("approximate"), "tanh");
}

TEST_F(FusionTest, XTimesSigmoidBecomesSwish) {
  const ValueId x = parameter("x", {5, 7}, 3);
  expect_fused(b_.mul(x, b_.op("Sigmoid", {x})), "Swish");
}

TEST_F(FusionTest, GeluOfAValueOthersReadStaysWhole) {
  const ValueId x = parameter("x", {5, 7}, 3);
  const ValueId sum = b_.add(b_.op("Erf", {b_.div(x, scalar(std::sqrt(2.0)))}), 1.0);
  const ValueId y = b_.mul(b_.mul(x, sum), 0.5);
  graph_.outputs() = {b_.add(y, sum)};
  Graph fused = graph_;
  run_fusions(fused);
  EXPECT_EQ(count(fused, "Gelu"), 0);
}

class BatchNormFusionTest : public FusionTest {
 protected:
  ValueId batch_norm(ValueId x, const std::string& name) {
    const ValueId moments = b_.op("BatchNormMoments", {x});
    return b_.op("BatchNormApply",
                 {x, moments, parameter(name + ".scale", {6}), parameter(name + ".bias", {6})},
                 {{"count", int64_t{60}}, {"epsilon", 1e-5}});
  }
  const Shape image_ = {4, 6, 3, 5};
};

TEST_F(BatchNormFusionTest, ReluBehindItIsTakenIn) {
  const ValueId y = b_.op("Relu", {batch_norm(parameter("x", image_), "bn")});
  expect_fused(y, "BatchNormApply", 2);
}

TEST_F(BatchNormFusionTest, ResidualAndReluAreTakenIn) {
  for (const bool first : {false, true}) {
    graph_ = Graph();
    feeds_.clear();
    const ValueId norm = batch_norm(parameter("x", image_), "bn");
    const ValueId residual = parameter("residual", image_);
    const ValueId sum = first ? b_.add(norm, residual) : b_.add(residual, norm);
    expect_fused(b_.op("Relu", {sum}), "BatchNormApply", 2);
  }
}

TEST_F(BatchNormFusionTest, OfTwoSummandsOneIsTakenIn) {
  const ValueId sum =
      b_.add(batch_norm(parameter("x", image_), "bn1"), batch_norm(parameter("z", image_), "bn2"));
  graph_.outputs() = {b_.op("Relu", {sum})};
  Graph fused = graph_;
  run_fusions(fused);
  EXPECT_EQ(count(fused, "BatchNormApply"), 2);
  EXPECT_EQ(count(fused, "Add") + count(fused, "Relu"), 0);
}

TEST_F(BatchNormFusionTest, ResidualThatBroadcastsStaysOutside) {
  const ValueId sum = b_.add(batch_norm(parameter("x", image_), "bn"), parameter("r", {6, 1, 1}));
  graph_.outputs() = {b_.op("Relu", {sum})};
  Graph fused = graph_;
  run_fusions(fused);
  EXPECT_EQ(count(fused, "Relu"), 1);
}

class AttentionFusionTest : public FusionTest {
 protected:
  void SetUp() override {
    q_ = parameter("q", {2, 3, 6, 4});
    k_ = parameter("k", {2, 3, 6, 4});
    v_ = parameter("v", {2, 3, 6, 5});
  }
  ValueId scores() { return b_.mul(b_.matmul(q_, b_.transpose(k_, {0, 1, 3, 2})), 0.5); }
  ValueId attend(ValueId scores) {
    return b_.matmul(b_.op("Softmax", {scores}, {{"axis", int64_t{3}}}), v_);
  }
  // [6, 6]: `above` where a key comes after the query.
  ValueId triangle(double below, double above) {
    std::vector<double> data;
    for (int i = 0; i < 36; ++i) {
      data.push_back(i % 6 > i / 6 ? above : below);
    }
    return b_.constant(Tensor::from(data, {6, 6}));
  }
  ValueId q_, k_, v_;
};

TEST_F(AttentionFusionTest, ScaledProductSoftmaxProductBecomesOneOperator) {
  const Graph fused = expect_fused(attend(scores()), "FusedAttention");
  EXPECT_EQ(fused.node(0).attributes.get_float("scale"), 0.5);
}

TEST_F(AttentionFusionTest, TriangleOfMinusInfinityBecomesCausal) {
  const double inf = std::numeric_limits<double>::infinity();
  const Graph fused = expect_fused(attend(b_.add(scores(), triangle(0, -inf))), "FusedAttention");
  EXPECT_EQ(fused.node(0).attributes.get_int("causal"), 1);
  EXPECT_EQ(fused.node(0).inputs.size(), 3u);
}

TEST_F(AttentionFusionTest, TheSameTriangleAsItIsComputedBecomesCausal) {
  const ValueId full = b_.op("Fill",
                             {},
                             {{"value", -std::numeric_limits<double>::infinity()},
                              {"shape", std::vector<int64_t>{6, 6}},
                              {"dtype", std::string("float64")}});
  const ValueId mask = b_.op("Trilu", {full}, {{"upper", int64_t{1}}, {"k", int64_t{1}}});
  const Graph fused = expect_fused(attend(b_.add(scores(), mask)), "FusedAttention");
  EXPECT_EQ(fused.node(0).attributes.get_int("causal"), 1);
  EXPECT_EQ(fused.node(0).inputs.size(), 3u);
}

TEST_F(AttentionFusionTest, WhereOnATriangleBecomesCausal) {
  const ValueId condition = b_.cast(triangle(1, 0), DType::kBool);
  Graph graph = graph_;
  const Tensor keep = evaluate(graph, feeds_, {condition})[0];
  const ValueId y = attend(b_.where(b_.constant(keep), scores(), scalar(-1e9)));
  const Graph fused = expect_fused(y, "FusedAttention");
  EXPECT_EQ(fused.node(0).attributes.get_int("causal"), 1);
}

TEST_F(AttentionFusionTest, OtherMasksStayInputs) {
  std::vector<double> data(12, 0.0);
  data[3] = data[7] = -1e9;
  const ValueId mask = b_.constant(Tensor::from(data, {2, 1, 1, 6}));
  const Graph fused = expect_fused(attend(b_.add(mask, scores())), "FusedAttention");
  EXPECT_EQ(fused.node(0).inputs.size(), 4u);
}

// Exporters hide keys by the type's lowest number; where all keys of a row are hidden, all have one
// score, and the log of their sum has no digits left for their number.
TEST_F(AttentionFusionTest, ARowHiddenAltogetherKeepsItsGradients) {
  std::vector<double> data(12, 0.0);
  std::fill_n(data.begin() + 6, 6, std::numeric_limits<double>::lowest());
  const ValueId mask = b_.constant(Tensor::from(data, {2, 1, 1, 6}));
  const Graph fused = expect_fused(attend(b_.add(mask, scores())), "FusedAttention");
  EXPECT_EQ(fused.node(0).inputs.size(), 4u);
}

TEST_F(AttentionFusionTest, AMaskOfA16BitFileIsReadInFloat32) {
  const ValueId mask = b_.constant(Tensor(DType::kFloat64, {2, 1, 1, 6}));
  graph_.outputs() = {attend(b_.add(scores(), mask))};
  for (ValueId id = 0; id < graph_.num_values(); ++id) {
    Value& value = graph_.value(id);
    value.type.dtype = DType::kBFloat16;
    value.constant = value.constant.defined() ? value.constant.cast(DType::kBFloat16) : Tensor();
  }
  run_fusions(graph_);
  verify(graph_, "after fusion");
  ASSERT_EQ(count(graph_, "FusedAttention"), 1);
  for (const Node& node : graph_.nodes()) {
    if (node.op_type == "FusedAttention") {
      EXPECT_EQ(graph_.value(node.inputs[0]).type.dtype, DType::kBFloat16);
      EXPECT_EQ(graph_.value(node.inputs[3]).type.dtype, DType::kFloat32);
    }
  }
}

TEST_F(AttentionFusionTest, TransposesOfHeadsAndSequenceDisappear) {
  // [batch, seq, heads, width], as projections leave them.
  const ValueId query = parameter("query", {2, 6, 3, 4}), key = parameter("key", {2, 6, 3, 4});
  v_ = b_.transpose(parameter("value", {2, 6, 3, 5}), {0, 2, 1, 3});
  const ValueId product =
      b_.matmul(b_.transpose(query, {0, 2, 1, 3}), b_.transpose(key, {0, 2, 3, 1}));
  const Graph fused = expect_fused(b_.transpose(attend(product), {0, 2, 1, 3}), "FusedAttention");
  EXPECT_EQ(fused.node(0).attributes.get_ints("sequence_major"),
            (std::vector<int64_t>{1, 1, 1, 1}));
}

TEST_F(AttentionFusionTest, OtherTransposesOfKeysRemain) {
  const ValueId key = parameter("key", {3, 2, 4, 6});  // [heads, batch, d, seq]
  const ValueId product = b_.matmul(q_, b_.transpose(key, {1, 0, 2, 3}));
  expect_fused(attend(product), "FusedAttention", /*nodes_left=*/2);
}

TEST_F(AttentionFusionTest, RepeatedHeadsAreReadOnce) {
  const auto repeat = [&](ValueId x) {  // [2, 1, 6, d] -> [2, 3, 6, d]
    Shape shape = b_.shape(x);
    const ValueId parts = b_.reshape(x, {2, 1, 1, 6, shape[3]});
    return b_.reshape(b_.expand(parts, {2, 1, 3, 6, shape[3]}), {2, 3, 6, shape[3]});
  };
  k_ = repeat(parameter("key", {2, 1, 6, 4}));
  v_ = repeat(parameter("value", {2, 1, 6, 5}));
  const Graph fused = expect_fused(attend(scores()), "FusedAttention");
  EXPECT_EQ(fused.value(fused.node(0).inputs[1]).type.shape, (Shape{2, 1, 6, 4}));
}

TEST_F(AttentionFusionTest, ATrainedBiasKeepsItsGradient) {
  const ValueId bias = parameter("bias", {3, 6, 6});
  const Graph fused = expect_fused(attend(b_.add(scores(), bias)), "FusedAttention");
  EXPECT_EQ(fused.node(0).inputs.size(), 4u);
}

TEST_F(AttentionFusionTest, DropoutDrawsWhatTheUnfusedGraphDraws) {
  const ValueId p = b_.op("Softmax", {scores()}, {{"axis", int64_t{3}}});
  const ValueId dropped = b_.op("Dropout",
                                {p},
                                {{"ratio", 0.5},
                                 {"rng_stream", int64_t{11}},
                                 {"batch_axis", int64_t{0}},
                                 {"rows_per_sample", int64_t{1}}});
  expect_fused(b_.matmul(dropped, v_), "FusedAttention");
}

}  // namespace
}  // namespace trainrt::testing
