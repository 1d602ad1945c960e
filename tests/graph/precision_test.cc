// What mixed precision makes of a forward graph: who is computed in which type, and where casts
// lie.
#include "graph/passes/precision.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/autodiff.h"
#include "graph/evaluator.h"
#include "graph/graph_builder.h"
#include "graph/loss.h"
#include "graph/op_def.h"
#include "graph/passes/pass.h"
#include "graph/verifier.h"
#include "tests/support/tolerance.h"

namespace trainrt {
namespace {

ValueId parameter(Graph& graph, const std::string& name, Shape shape) {
  Value value;
  value.name = name;
  value.type = {DType::kFloat32, std::move(shape)};
  value.kind = ValueKind::kParameter;
  return graph.add_value(std::move(value));
}

DType dtype_of_value(const Graph& graph, const std::string& name) {
  return graph.value(graph.find_value(name).value()).type.dtype;
}

int count_casts_of(const Graph& graph, const std::string& name) {
  const ValueId id = graph.find_value(name).value();
  return static_cast<int>(
      std::count_if(graph.nodes().begin(), graph.nodes().end(), [&](const Node& node) {
        return node.op_type == "Cast" && node.inputs[0] == id;
      }));
}

// relu(x w + b) w, exp of it beside it.
Graph dense() {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId x = graph.add_input("x", {DType::kFloat32, {4, 8}}, 0);
  const ValueId w = parameter(graph, "w", {8, 8});
  const ValueId b = parameter(graph, "b", {8});
  const ValueId product = builder.op("MatMul", {x, w}, {}, "first", "product");
  const ValueId sum = builder.op("Add", {product, b}, {}, "add", "sum");
  const ValueId relu = builder.op("Relu", {sum}, {}, "relu", "hidden");
  const ValueId y = builder.op("MatMul", {relu, w}, {}, "second", "y");
  const ValueId e = builder.op("Exp", {y}, {}, "exp", "e");
  graph.outputs() = {y, e};
  return graph;
}

TEST(LowerPrecisionTest, ProductsRunLowAndWhatFollowsThemToo) {
  for (const DType low : {DType::kBFloat16, DType::kFloat16}) {
    const Graph graph = lower_precision(dense(), low);
    verify(graph, "lowered");
    for (const char* name : {"product", "sum", "hidden"}) {
      EXPECT_EQ(dtype_of_value(graph, name), low) << name;
    }
    EXPECT_EQ(dtype_of_value(graph, "e"), DType::kFloat32);
  }
}

TEST(LowerPrecisionTest, ParametersInputsAndOutputsKeepTheirTypesAndNames) {
  const Graph graph = lower_precision(dense(), DType::kBFloat16);
  for (const char* name : {"x", "w", "b", "y", "e"}) {
    EXPECT_EQ(dtype_of_value(graph, name), DType::kFloat32) << name;
  }
  ASSERT_EQ(graph.outputs().size(), 2u);
  EXPECT_EQ(graph.value(graph.outputs()[0]).name, "y");
  EXPECT_EQ(graph.value(*graph.find_value("w")).kind, ValueKind::kParameter);
}

TEST(LowerPrecisionTest, ConstantsAreCastWhereTheyAreKnown) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId x = graph.add_input("x", {DType::kFloat32, {4, 2}}, 0);
  const ValueId product =
      builder.op("MatMul", {x, parameter(graph, "w", {2, 2})}, {}, "first", "product");
  const ValueId table =
      graph.add_constant("table", Tensor::from(std::vector<float>{1, 2.0078125f}, {2}));
  graph.outputs() = {builder.op("Mul", {product, table}, {}, "scale", "y")};
  const Graph lowered = lower_precision(graph, DType::kBFloat16);
  verify(lowered, "lowered");
  EXPECT_EQ(count_casts_of(lowered, "table"), 0);
  const Value& cast = lowered.value(*lowered.find_value("table.bfloat16"));
  ASSERT_EQ(cast.kind, ValueKind::kConstant);
  EXPECT_EQ(cast.constant.to_double(), (std::vector<double>{1, 2}));  // 8 bits are too few
}

TEST(LowerPrecisionTest, AValueIsCastOnceHoweverManyReadIt) {
  const Graph graph = lower_precision(dense(), DType::kBFloat16);
  EXPECT_EQ(count_casts_of(graph, "w"), 1);
  EXPECT_EQ(count_casts_of(graph, "y.bfloat16"), 1);  // Exp and the output share it
}

TEST(LowerPrecisionTest, AResidualInFloat32StaysSo) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId x = graph.add_input("x", {DType::kFloat32, {4, 8}}, 0);
  const ValueId y = builder.op("MatMul", {x, parameter(graph, "w", {8, 8})}, {}, "product", "y");
  graph.outputs() = {builder.op("Add", {x, y}, {}, "add", "z")};
  const Graph lowered = lower_precision(graph, DType::kBFloat16);
  EXPECT_EQ(dtype_of_value(lowered, "y"), DType::kBFloat16);
  EXPECT_EQ(dtype_of_value(lowered, "z"), DType::kFloat32);
  EXPECT_EQ(count_casts_of(lowered, "z"), 0);
}

TEST(LowerPrecisionTest, EmbeddingsAreLookedUpInFloat32AndHandedOnLow) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId ids = graph.add_input("ids", {DType::kInt64, {4}}, 0);
  const ValueId table = parameter(graph, "table", {10, 8});
  const ValueId row = builder.op("Gather", {table, ids}, {{"axis", int64_t{0}}}, "gather", "row");
  graph.outputs() = {builder.op("Relu", {row}, {}, "relu", "y")};
  const Graph lowered = lower_precision(graph, DType::kBFloat16);
  EXPECT_EQ(count_casts_of(lowered, "table"), 0);
  EXPECT_EQ(dtype_of_value(lowered, "row"), DType::kFloat32);
  EXPECT_EQ(dtype_of_value(lowered, "y.bfloat16"), DType::kBFloat16);
}

TEST(ApplyPrecisionTest, AModelStoredIn16BitsGetsFloat32Masters) {
  Graph graph = convert_floats(lower_precision(dense(), DType::kFloat16), DType::kFloat32);
  for (Value value : graph.values()) {
    EXPECT_EQ(value.type.dtype, DType::kFloat32) << value.name;
  }
  Graph stored;
  GraphBuilder builder(stored);
  const ValueId x = stored.add_input("x", {DType::kFloat16, {4, 8}}, 0);
  Value w;
  w.name = "w";
  w.type = {DType::kFloat16, {8, 8}};
  w.kind = ValueKind::kParameter;
  w.source.load = [] { return Tensor(DType::kFloat16, {8, 8}); };
  stored.outputs() = {builder.op("MatMul", {x, stored.add_value(w)}, {}, "product", "y")};
  for (const char* precision : {"fp32", "bf16", "fp16"}) {
    const Graph trained = apply_precision(stored, precision);
    EXPECT_EQ(dtype_of_value(trained, "w"), DType::kFloat32) << precision;
    EXPECT_EQ(trained.value(*trained.find_value("w")).source.load().dtype(), DType::kFloat32);
  }
}

// A file stored in float64 is trained in what --precision says; a file in float32 keeps what it
// computes in float64 by a Cast of its own.
TEST(ApplyPrecisionTest, FloatsOf64BitsFollowToo) {
  const Graph doubles = convert_floats(dense(), DType::kFloat64);
  for (const char* name : {"x", "w", "product", "y"}) {
    EXPECT_EQ(dtype_of_value(doubles, name), DType::kFloat64) << name;
    EXPECT_EQ(dtype_of_value(apply_precision(doubles, "fp64"), name), DType::kFloat64) << name;
    EXPECT_EQ(dtype_of_value(apply_precision(doubles, "fp32"), name), DType::kFloat32) << name;
  }
  const Graph low = apply_precision(doubles, "bf16");
  EXPECT_EQ(dtype_of_value(low, "w"), DType::kFloat32);
  EXPECT_EQ(dtype_of_value(low, "product"), DType::kBFloat16);

  Graph mixed = dense();
  GraphBuilder builder(mixed);
  const ValueId wide = builder.op(
      "Cast", {mixed.find_value("y").value()}, {{"to", std::string("float64")}}, "widen", "wide");
  mixed.outputs().push_back(builder.op("Exp", {wide}, {}, "exp64", "e64"));
  EXPECT_EQ(dtype_of_value(apply_precision(mixed, "fp32"), "e64"), DType::kFloat64);
}

TEST(ApplyPrecisionTest, UnknownNamesAreExplained) {
  for (const char* name : {"tf32", "fp61"}) {
    try {
      apply_precision(dense(), name);
      FAIL() << name;
    } catch (const Error& error) {
      EXPECT_NE(error.message().find("bf16"), std::string::npos) << error.message();
    }
  }
}

// The lowest of float32, by which masks hide keys, is minus infinity in 16 bits, and a softmax of
// such alone no number; what scales by more than they hold would scale by another number.
TEST(LowerPrecisionTest, ConstantsBeyond16BitsAreReadInFloat32) {
  const float lowest = std::numeric_limits<float>::lowest(),
              infinity = std::numeric_limits<float>::infinity();
  const auto sum_type = [&](float number, DType low) {
    Graph graph;
    GraphBuilder builder(graph);
    const ValueId x = graph.add_input("x", {DType::kFloat32, {4, 3}}, 0);
    const ValueId product =
        builder.op("MatMul", {x, parameter(graph, "w", {3, 3})}, {}, "first", "product");
    const ValueId addend =
        graph.add_constant("addend", Tensor::from(std::vector<float>{number, -1, 2}, {3}));
    const ValueId sum = builder.op("Add", {product, addend}, {}, "add", "sum");
    graph.outputs() = {builder.op("Relu", {sum}, {}, "relu", "y")};
    const Graph lowered = lower_precision(graph, low);
    return lowered.value(lowered.find_value("sum").value()).type.dtype;
  };
  for (const DType low : {DType::kBFloat16, DType::kFloat16}) {
    EXPECT_EQ(sum_type(lowest, low), DType::kFloat32);
    EXPECT_EQ(sum_type(-infinity, low), low);  // means what it says in any type
    EXPECT_EQ(sum_type(6e4f, low), low);
    EXPECT_EQ(sum_type(1e6f, low), low == DType::kFloat16 ? DType::kFloat32 : low);
  }
}

// A classifier of 4 samples, and what is made of its scores.
struct Classifier {
  Graph graph;
  LossValues loss;

  explicit Classifier(DType low) {
    Graph forward;
    GraphBuilder builder(forward);
    const ValueId x = forward.add_input("x", {DType::kFloat32, {4, 8}}, 0);
    const ValueId y =
        builder.op("MatMul", {x, parameter(forward, "w", {8, 300})}, {}, "product", "scores");
    forward.outputs() = {y};
    graph = lower_precision(forward, low);
    LossSpec spec;
    spec.kind = "softmax_cross_entropy";
    spec.output = "scores";
    spec.labels = "labels";
    spec.labels_shape = {4};
    loss = build_loss(graph, spec, /*count_correct=*/true);
    graph.outputs() = {loss.loss_sum, loss.item_count, loss.correct};
  }

  // The loss, right items, and the gradient of w.
  std::vector<Tensor> evaluated() const {
    Graph with_grad = graph;
    GraphBuilder builder(with_grad);
    const ValueId seed = builder.scalar(0.25, DType::kFloat64);
    const ValueId w = with_grad.find_value("w").value();
    const ValueId grad = differentiate(with_grad, {loss.loss_sum}, {seed}, {w})[0];
    const auto draw = [](Shape shape) {
      Tensor tensor(DType::kFloat32, std::move(shape));
      for (int64_t i = 0; i < tensor.num_elements(); ++i) {
        tensor.data<float>()[i] = std::sin(0.37f * static_cast<float>(i));
      }
      return tensor;
    };
    EvaluateOptions options;
    options.reference_kernels = false;
    return evaluate(with_grad,
                    {{"x", draw({4, 8})},
                     {"w", draw({8, 300})},
                     {"labels", Tensor::from<int64_t>({3, 299, 0, 77}, {4})}},
                    {loss.loss_sum, loss.correct, grad},
                    options);
  }

  DType scores_of_loss() const {
    return graph.value(graph.node(graph.value(loss.loss_sum).producer).inputs[0]).type.dtype;
  }
};

TEST(ReadLowScoresTest, LossesReadScoresAsTheyLieAndKeepTheirBits) {
  for (const DType low : {DType::kBFloat16, DType::kFloat16}) {
    Classifier classifier(low);
    ASSERT_EQ(classifier.scores_of_loss(), DType::kFloat32);
    const std::vector<Tensor> expected = classifier.evaluated();
    read_low_scores(classifier.graph);
    classifier.graph = eliminate_dead_code(classifier.graph);
    verify(classifier.graph, "read low");
    for (const Node& node : classifier.graph.nodes()) {
      EXPECT_TRUE(node.op_type != "Cast" || node.name.find("scores") == std::string::npos)
          << node.name;
    }
    Classifier again(low);  // with the ids of its values
    read_low_scores(again.graph);
    EXPECT_EQ(again.scores_of_loss(), low);
    const std::vector<Tensor> actual = again.evaluated();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(testing::tensors_identical(actual[i], expected[i])) << i;
    }
  }
}

// Their gradients are added in float32.
TEST(ReadLowScoresTest, ACastThatOthersReadStays) {
  Classifier classifier(DType::kBFloat16);
  GraphBuilder builder(classifier.graph);
  const ValueId scores = classifier.graph.find_value("scores").value();
  classifier.graph.outputs().push_back(builder.op("Exp", {scores}));
  read_low_scores(classifier.graph);
  EXPECT_EQ(classifier.scores_of_loss(), DType::kFloat32);
  classifier.graph.outputs().back() = scores;
  read_low_scores(classifier.graph);
  EXPECT_EQ(classifier.scores_of_loss(), DType::kFloat32);
  classifier.graph.outputs().pop_back();
  read_low_scores(classifier.graph);  // Exp is dead now
  EXPECT_EQ(classifier.scores_of_loss(), DType::kBFloat16);
}

// An operator that mixed precision lowers has kernels for it, forward and backward.
TEST(PrecisionRuleTest, SumsAndLossesStayInFloat32) {
  for (const char* name : {"ReduceSum", "SoftmaxCrossEntropyLoss", "Exp", "Log", "Pow", "AdamW"}) {
    EXPECT_EQ(get_op(name).precision, PrecisionRule::kFull) << name;
  }
  for (const char* name : {"MatMul", "Conv", "FusedAttention"}) {
    EXPECT_EQ(get_op(name).precision, PrecisionRule::kLow) << name;
  }
}

}  // namespace
}  // namespace trainrt
