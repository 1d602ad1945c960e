// Losses and their gradients against PyTorch in float64 (tests/data/losses.py), and what the
// generated operator tests cannot see: cross-entropy together with its statistics.
#include "graph/loss.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "graph/autodiff.h"
#include "graph/evaluator.h"
#include "graph/graph_builder.h"
#include "tests/support/gradient_check.h"
#include "tests/support/paths.h"
#include "tests/support/tolerance.h"

namespace trainrt {
namespace {

using nlohmann::json;
using Vector = std::vector<double>;

json golden() {
  std::ifstream file(testing::source_path("tests/data/losses.json"));
  return json::parse(file);
}

// The graph of one case: "scores" -> loss sum, with weights where build_loss() takes none.
struct LossCase {
  Graph graph;
  ValueId scores = kNoValue;
  LossValues loss;
};

LossCase make_loss(const json& c, DType dtype) {
  LossCase result;
  Graph& graph = result.graph;
  const Shape shape = c["shape"].get<Shape>();
  Value scores;
  scores.name = "scores";
  scores.type = {dtype, shape};
  scores.kind = ValueKind::kParameter;
  scores.source = {
      "test", [=] { return Tensor::from<double>(c["scores"].get<Vector>(), shape).cast(dtype); }};
  result.scores = graph.add_value(scores);
  graph.outputs() = {result.scores};
  LossSpec spec;
  spec.kind = c["kind"];
  spec.output = "scores";
  spec.labels = "labels";
  spec.labels_shape = shape;
  if (c.contains("ignore")) {
    spec.labels_shape.erase(spec.labels_shape.begin() + 1);
    spec.ignore_index = c["ignore"].is_null() ? -100 : c["ignore"].get<int64_t>();
  } else {
    spec.labels_dtype = dtype;
  }
  result.loss = build_loss(graph, spec, false);
  if (c.contains("weights") && !c["weights"].is_null()) {
    GraphBuilder builder(graph);
    const Vector weights = c["weights"].get<Vector>();
    const ValueId w = builder.constant(
        Tensor::from<double>(weights, {static_cast<int64_t>(weights.size())}).cast(dtype));
    for (ValueId* value : {&result.loss.loss_sum, &result.loss.item_count}) {
      const Node unweighted = graph.node(graph.value(*value).producer);
      std::vector<ValueId> inputs = unweighted.inputs;
      inputs.push_back(w);
      *value = builder.op(unweighted.op_type, inputs, unweighted.attributes);
    }
  }
  return result;
}

Tensor labels_of(const json& c, const Graph& graph) {
  const TensorType type = graph.value(graph.find_value("labels").value()).type;
  return Tensor::from<double>(c["labels"].get<Vector>(), type.shape).cast(type.dtype);
}

void expect_close(const Tensor& actual, const Vector& wanted, double tolerance) {
  const Vector values = actual.to_double();
  ASSERT_EQ(values.size(), wanted.size());
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_NEAR(values[i], wanted[i], tolerance * std::max(1.0, std::abs(wanted[i]))) << i;
  }
}

TEST(LossTest, AgreesWithPyTorch) {
  int num_cases = 0;
  for (const json& c : golden()) {
    for (const DType dtype : {DType::kFloat64, DType::kFloat32}) {
      for (const bool reference : {true, false}) {
        SCOPED_TRACE(concat(c["kind"],
                            " ",
                            c["shape"].dump(),
                            " ",
                            dtype_name(dtype),
                            reference ? " reference" : " fast"));
        LossCase test = make_loss(c, dtype);
        GraphBuilder builder(test.graph);
        const ValueId seed = builder.scalar(1, DType::kFloat64);
        const ValueId grad =
            differentiate(test.graph, {test.loss.loss_sum}, {seed}, {test.scores})[0];
        EvaluateOptions options;
        options.reference_kernels = reference;
        const std::vector<Tensor> values =
            evaluate(test.graph,
                     {{"labels", labels_of(c, test.graph)}},
                     {test.loss.loss_sum, test.loss.item_count, grad},
                     options);
        const double tolerance = dtype == DType::kFloat64 ? 1e-12 : 3e-6;
        const double sum = values[0].to_double()[0];
        expect_close(values[0], {c["sum"].get<double>()}, tolerance);
        EXPECT_NEAR(sum / values[1].to_double()[0],
                    c["mean"].get<double>(),
                    tolerance * std::max(1.0, std::abs(c["mean"].get<double>())));
        expect_close(values[2], c["grad"].get<Vector>(), tolerance);
      }
    }
    ++num_cases;
  }
  EXPECT_EQ(num_cases, 14);
}

TEST(LossTest, CrossEntropyGradientEqualsFiniteDifferences) {
  for (const json& c : golden()) {
    if (c["kind"] != "softmax_cross_entropy" || c["shape"][1] == 50) {
      continue;
    }
    const LossCase test = make_loss(c, DType::kFloat64);
    const Shape shape = c["shape"].get<Shape>();
    EXPECT_TRUE(testing::gradients_match_finite_differences(
        test.graph,
        {test.loss.loss_sum},
        {test.scores},
        {{"scores", Tensor::from<double>(c["scores"].get<Vector>(), shape)},
         {"labels", labels_of(c, test.graph)}}));
  }
}

// What a loss makes of `scores` (batch 3): its sum, or each item's, and the gradient.
std::vector<Tensor> cross_entropy_of(const Tensor& scores,
                                     int64_t axis,
                                     const char* reduction,
                                     bool reference) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId x = builder.constant(scores, "scores");
  Shape items = scores.shape();
  items.erase(items.begin() + axis);
  Tensor classes(DType::kInt64, items);
  for (int64_t i = 0; i < classes.num_elements(); ++i) {
    classes.data<int64_t>()[i] = i % 5 == 2 ? -100 : i * 37 % scores.shape()[size_t(axis)];
  }
  const ValueId labels = builder.constant(classes, "labels");
  const ValueId maxima = builder.op(
      "ReduceMax", {x}, {{"axes", std::vector<int64_t>{axis}}, {"keepdims", int64_t{0}}});
  const ValueId sums = builder.op("SumExp", {x, maxima}, {{"axis", axis}});
  Attributes attributes = {{"axis", axis}, {"ignore_index", int64_t{-100}}};
  attributes.set("reduction", std::string(reduction));
  const ValueId loss = builder.op("SoftmaxCrossEntropyLoss", {x, labels, maxima, sums}, attributes);
  const ValueId best = builder.op("FirstMaxIndex", {x, maxima}, {{"axis", axis}});
  const ValueId seed =
      builder.constant(Tensor(graph.value(loss).type.dtype, graph.value(loss).type.shape), "seed");
  for (int64_t i = 0; i < num_elements(graph.value(seed).type.shape); ++i) {
    Tensor& value = graph.value(seed).constant;
    if (value.dtype() == DType::kFloat64) {
      value.data<double>()[i] = 0.25;
    } else {
      value.data<float>()[i] = 0.1f * static_cast<float>(i + 1);
    }
  }
  attributes.erase("reduction");
  const ValueId grad =
      builder.op("SoftmaxCrossEntropyGrad", {x, labels, maxima, sums, seed}, attributes);
  EvaluateOptions options;
  options.reference_kernels = reference;
  return evaluate(graph, {}, {loss, best, grad}, options);
}

// Of any layout, by both kernels: 16-bit scores give what their float32 copies give, and a gradient
// that is rounded once.
TEST(LossTest, SixteenBitScoresGiveTheBitsOfTheirFloat32Copies) {
  for (const DType low : {DType::kBFloat16, DType::kFloat16}) {
    for (const int64_t axis : {1, 2}) {
      for (const bool reference : {true, false}) {
        for (const char* reduction : {"sum", "none"}) {
          SCOPED_TRACE(concat(
              dtype_name(low), " axis ", axis, " ", reduction, reference ? " reference" : " fast"));
          Tensor drawn(DType::kFloat32, {3, 700, 19});
          for (int64_t i = 0; i < drawn.num_elements(); ++i) {
            drawn.data<float>()[i] = 6 * std::sin(0.7f * static_cast<float>(i));
          }
          const Tensor scores = drawn.cast(low);
          const std::vector<Tensor> actual = cross_entropy_of(scores, axis, reduction, reference);
          const std::vector<Tensor> expected =
              cross_entropy_of(scores.cast(DType::kFloat32), axis, reduction, reference);
          EXPECT_TRUE(testing::tensors_identical(actual[0], expected[0]));
          EXPECT_TRUE(testing::tensors_identical(actual[1], expected[1]));
          EXPECT_TRUE(testing::tensors_identical(actual[2], expected[2].cast(low)));
        }
      }
    }
  }
}

TEST(LossTest, LabelOutsideTheClassesIsRefusedByName) {
  const json c = golden()[0];
  const LossCase test = make_loss(c, DType::kFloat64);
  std::vector<int64_t> labels = c["labels"].get<std::vector<int64_t>>();
  labels[2] = 5;
  try {
    evaluate(test.graph, {{"labels", Tensor::from<int64_t>(labels, {6})}}, {test.loss.item_count});
    FAIL() << "accepted label 5 of 5 classes";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("class label 5 at item 2"), std::string::npos)
        << error.what();
  }
}

TEST(LossTest, TieCountsAsItsFirstClass) {
  Graph graph;
  GraphBuilder builder(graph);
  const ValueId scores = builder.constant(Tensor::from<float>({0, 0, 0, 1, 2, 2}, {2, 3}), "s");
  graph.outputs() = {scores};
  LossSpec spec;
  spec.kind = "softmax_cross_entropy";
  spec.output = "s";
  spec.labels = "labels";
  spec.labels_shape = {2};
  const LossValues loss = build_loss(graph, spec, true);
  const auto correct = [&](int64_t a, int64_t b) {
    return evaluate(graph, {{"labels", Tensor::from<int64_t>({a, b}, {2})}}, {loss.correct})[0]
        .to_double()[0];
  };
  EXPECT_EQ(correct(0, 1), 2);
  EXPECT_EQ(correct(1, 2), 0);
  EXPECT_EQ(correct(0, 2), 1);
}

}  // namespace
}  // namespace trainrt
