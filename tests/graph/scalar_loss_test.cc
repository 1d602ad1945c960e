// What a loss inside the model, and labels outside of it, make of the samples.
#include "graph/scalar_loss.h"

#include <gmock/gmock.h>

#include "graph/graph_builder.h"
#include "graph/training_graph.h"
#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using testing::at_batch;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::model_of;
using ::testing::Not;

ScalarLoss described(const std::string& body, bool doubled = true) {
  const OnnxModel model = model_of("(float[N, 4] x) => (float loss)",
                                   "float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}",
                                   "h = MatMul(x, w)\n" + body);
  const Graph graph = model.bind(at_batch(6));
  const Graph twice = model.bind(at_batch(12));
  return describe_scalar_loss(graph, *graph.find_value("loss"), doubled ? &twice : nullptr);
}

const std::string kAxis0 = "axes = Constant<value = int64[1] {0}>()\n";

TEST(ScalarLossTest, AMeanOverSamplesNeedsNoWord) {
  const ScalarLoss loss = described("loss = ReduceMean<keepdims = 0>(h)");
  EXPECT_FALSE(loss.sums_samples);
  EXPECT_THAT(loss.warning, IsEmpty());
}

std::string number(const std::string& name, const std::string& value) {
  return name + " = Constant<value = float {" + value + "}>()\n";
}

const std::string kSumOfAll = "s = ReduceSum<keepdims = 0>(h)\n";
// Of the samples, as PyTorch's exporter computes it; folded into a number when the batch is known.
const std::string kCount =
    "shape = Shape(x)\nzero = Constant<value = int64 {0}>()\n"
    "n64 = Gather<axis = 0>(shape, zero)\nn = Cast<to = 1>(n64)\n";

// [N, 1]; 1 where a score is positive; the class of the highest score.
const std::string kRows =
    "shape1 = Shape<end = 1>(x)\none1 = Constant<value = int64[1] {1}>()\n"
    "rows = Concat<axis = 0>(shape1, one1)\n";
const std::string kPositive =
    "nil = Constant<value = float {0}>()\np = Greater(h, nil)\ni = Cast<to = 7>(p)\n";
const std::string kClasses = "best = ArgMax<axis = 1, keepdims = 0>(h)\n";

TEST(ScalarLossTest, ASumOverSamplesIsOneInAnyForm) {
  for (const std::string& body :
       {std::string("loss = ReduceSum<keepdims = 0>(h)"),
        kSumOfAll + "loss = Neg(s)",
        kSumOfAll + number("half", "0.5") + "loss = Mul(half, s)",
        kSumOfAll + number("six", "6") + "loss = Div(s, six)",
        std::string("loss = ReduceSumSquare<keepdims = 0>(h)"),
        std::string("loss = ReduceL1<keepdims = 0>(h)"),
        std::string("loss = Einsum<equation = \"ij,ij->\">(h, h)"),
        std::string("row = Constant<value = int64[2] {1, -1}>()\n"
                    "column = Constant<value = int64[2] {-1, 1}>()\na = Reshape(h, row)\n"
                    "b = Reshape(h, column)\nc = MatMul(a, b)\nloss = Squeeze(c)"),
        kAxis0 + "m = ReduceSum<keepdims = 0>(h, axes)\nloss = ReduceMean<keepdims = 0>(m)",
        kSumOfAll + "q = ReduceSumSquare<keepdims = 0>(x)\n" + number("beta", "-0.5") +
            "k = Mul(beta, q)\nloss = Sub(s, k)",
        kCount + "m = ReduceMean<keepdims = 0>(h)\nloss = Mul(m, n)",
        kCount + "a = Mul(h, n)\nloss = ReduceMean<keepdims = 0>(a)",
        kCount + "a = Div(h, n)\nb = ReduceSum<keepdims = 0>(a)\nloss = Mul(b, n)"}) {
    const ScalarLoss loss = described(body);
    EXPECT_TRUE(loss.sums_samples) << body;
    EXPECT_THAT(loss.warning, HasSubstr("is a sum")) << body;
  }
}

TEST(ScalarLossTest, AMeanOverSamplesIsOneInAnyForm) {
  for (const std::string& body :
       {kCount + kSumOfAll + "loss = Div(s, n)",
        kCount + "a = Div(h, n)\nloss = ReduceSum<keepdims = 0>(a)",
        kCount + number("one", "1") + "i = Div(one, n)\na = Mul(i, h)\nb = Relu(a)\n" + kAxis0 +
            "c = ReduceSum<keepdims = 0>(b, axes)\nloss = ReduceMean<keepdims = 0>(c)",
        std::string("all = Size(x)\nn = Cast<to = 1>(all)\n") + kSumOfAll + "loss = Div(s, n)",
        kCount + "m = ReduceMean<axes = [1], keepdims = 0>(h)\na = Div(m, n)\n"
                 "loss = ReduceSum<keepdims = 0>(a)",
        std::string("a = ReduceMean<keepdims = 1>(h)\nb = ReduceMean<keepdims = 1>(x)\n"
                    "c = Concat<axis = 0>(a, b)\nloss = ReduceSum<keepdims = 0>(c)"),
        std::string("m = ReduceMean<axes = [0], keepdims = 0>(h)\n"
                    "loss = ReduceSum<keepdims = 0>(m)"),
        "m = ReduceMean<keepdims = 0>(h)\nr = ReduceSumSquare<keepdims = 0>(w)\n" +
            number("decay", "0.01") + "d = Mul(r, decay)\nloss = Add(m, d)",
        // One for each sample, added up, is their number, though no sample is in it.
        kRows + kSumOfAll +
            "one = ReduceMax<keepdims = 0>(w)\n"
            "ones = Expand(one, rows)\nm = ReduceSum<keepdims = 0>(ones)\n"
            "loss = Div(s, m)",
        kClasses + number("two", "2") + "c = SoftmaxCrossEntropyLoss(h, best)\nloss = Mul(c, two)",
        kClasses + "c = SoftmaxCrossEntropyLoss(h, best)\nr = ReduceSumSquare<keepdims = 0>(w)\n"
                   "loss = Add(c, r)"}) {
    const ScalarLoss loss = described(body);
    EXPECT_FALSE(loss.sums_samples) << body;
    EXPECT_THAT(loss.warning, IsEmpty()) << body;
  }
}

TEST(ScalarLossTest, WhatIsNeitherSaysThatItDependsOnTheCut) {
  for (const std::string& body :
       {std::string("m = ReduceLogSumExp<axes = [0], keepdims = 0>(h)\n"
                    "loss = ReduceSum<keepdims = 0>(m)"),
        std::string("m = ReduceMax<axes = [0], keepdims = 0>(h)\n"
                    "loss = ReduceMean<keepdims = 0>(m)"),
        std::string("a = ReduceMean<keepdims = 1>(h)\nb = ReduceSum<keepdims = 1>(x)\n"
                    "c = Concat<axis = 0>(a, b)\nloss = ReduceSum<keepdims = 0>(c)"),
        std::string("m = ReduceMean<keepdims = 0>(h)\nloss = Exp(m)"),
        kCount + "a = Div(h, n)\nloss = ReduceMean<keepdims = 0>(a)",
        kCount + "r = Log(n)\na = Mul(h, r)\nloss = ReduceSum<keepdims = 0>(a)",
        std::string("loss = ReduceL2<keepdims = 0>(h)"),
        kSumOfAll + "loss = Mul(s, s)",
        kSumOfAll + "m = ReduceMean<keepdims = 0>(h)\nloss = Add(s, m)",
        kSumOfAll + "r = ReduceSumSquare<keepdims = 0>(w)\nloss = Add(s, r)",
        kCount + kSumOfAll + "a = Div(s, n)\nloss = Div(a, n)",
        // Numbers of samples of a kind, counted as integers.
        kPositive + "k = ReduceSum<keepdims = 0>(i)\nn = Cast<to = 1>(k)\n" + kSumOfAll +
            "loss = Div(s, n)",
        kPositive + "k = ReduceMax<keepdims = 0>(i)\nn = Cast<to = 1>(k)\n"
                    "m = ReduceMean<keepdims = 0>(h)\nloss = Mul(m, n)",
        // Some of the samples, and sums of the first so many.
        std::string("z = Constant<value = int64 {0}>()\ng = Gather<axis = 0>(h, z)\n"
                    "loss = ReduceMean<keepdims = 0>(g)"),
        std::string("two = Constant<value = int64[1] {2}>()\nv, i = TopK<axis = 0>(h, two)\n"
                    "loss = ReduceMean<keepdims = 0>(v)"),
        std::string("z = Constant<value = int64 {0}>()\nc = CumSum(h, z)\n"
                    "loss = ReduceMean<keepdims = 0>(c)"),
        // As long as the batch, though not made of samples.
        kRows + "row = ReduceMean<axes = [0], keepdims = 1>(w)\ne = Expand(row, rows)\n"
                "r = ReduceSumSquare<keepdims = 0>(e)\nm = ReduceMean<keepdims = 0>(h)\n"
                "loss = Add(m, r)",
        kClasses + "c = SoftmaxCrossEntropyLoss<ignore_index = 1>(h, best)\n"
                   "r = ReduceSumSquare<keepdims = 0>(w)\nloss = Add(c, r)"}) {
    const ScalarLoss loss = described(body);
    EXPECT_FALSE(loss.sums_samples) << body;
    EXPECT_THAT(loss.warning, HasSubstr("depends on how a step is cut")) << body;
    EXPECT_THAT(loss.warning, HasSubstr("--dp 1")) << body;
  }
}

TEST(ScalarLossTest, ANumberOfAModelOfOneSizeMayBeTheNumberOfSamples) {
  const std::string body = kSumOfAll + number("six", "6") + "loss = Div(s, six)";
  EXPECT_FALSE(described(body, /*doubled=*/false).sums_samples);
}

TEST(ScalarLossTest, SamplesThatMeetAreNamed) {
  EXPECT_THAT(described("t = Transpose<perm = [1, 0]>(h)\n[pairs] p = MatMul(h, t)\n"
                        "loss = ReduceMean<keepdims = 0>(p)")
                  .warning,
              HasSubstr("samples meet in node 'pairs'"));
  EXPECT_THAT(described("m = ReduceMean<axes = [0], keepdims = 1>(h)\n[centred] d = Sub(h, m)\n"
                        "s = Mul(d, d)\nloss = ReduceMean<keepdims = 0>(s)")
                  .warning,
              HasSubstr("samples meet in node 'centred'"));
}

TEST(LabelPlaceTest, LabelsLieAsTheOutputDoes) {
  const OnnxModel model = model_of("(float[5, N, 4] x) => (float[5, N, 3] y)",
                                   "float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}",
                                   "y = MatMul(x, w)");
  BindOptions bind = at_batch(6);
  bind.batch_axes["x"] = 1;
  const Graph graph = model.bind(bind);
  const TensorType targets{DType::kFloat32, {6, 5, 3}}, classes{DType::kInt64, {6, 5}};
  const LossSpec mse = resolve_loss(graph, {}, &targets);
  EXPECT_EQ(mse.labels_shape, (Shape{5, 6, 3}));
  EXPECT_EQ(mse.labels_batch_axis, 1);
  const LossSpec cross_entropy = resolve_loss(graph, {}, &classes);
  EXPECT_EQ(cross_entropy.labels_shape, (Shape{5, 6}));
  EXPECT_EQ(cross_entropy.labels_batch_axis, 1);
  // Without labels: those that synthetic data draw.
  LossSpec drawn;
  drawn.kind = "softmax_cross_entropy";
  EXPECT_EQ(resolve_loss(graph, drawn, nullptr).labels_shape, (Shape{5, 6}));
}

TEST(LabelPlaceTest, OneSampleAndMergedSamplesAreFollowedToo) {
  const OnnxModel model = model_of("(float[N, 5, 4] x) => (float[R, 3] y)",
                                   "float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}",
                                   "h = MatMul(x, w)\nt = Transpose<perm = [1, 0, 2]>(h)\n"
                                   "rows = Constant<value = int64[2] {-1, 3}>()\n"
                                   "y = Reshape(t, rows)");
  const TensorType classes{DType::kInt64, {1, 5}};
  const LossSpec loss = resolve_loss(model.bind(at_batch(1)), {}, &classes, [&](int64_t batch) {
    return std::optional<Graph>(model.bind(at_batch(batch)));
  });
  EXPECT_EQ(loss.labels_shape, (Shape{5, 1}));
  EXPECT_EQ(loss.labels_batch_axis, 1);
}

// Samples that cannot be followed: the sizes say that they are merged, and not in which order.
TEST(LabelPlaceTest, AnOpenOrderIsRefusedUnlessAllLiesBatchFirst) {
  for (const bool time_first : {false, true}) {
    Graph graph, more;
    for (auto [to, batch] : {std::pair(&graph, int64_t{6}), std::pair(&more, int64_t{7})}) {
      GraphBuilder builder(*to);
      const Shape shape = time_first ? Shape{5, batch} : Shape{batch, 5};
      const ValueId x = to->add_input("x", {DType::kFloat32, shape}, time_first ? 1 : 0);
      const ValueId y = builder.fill(0, {DType::kFloat32, {5 * batch, 3}});
      to->rename_value(y, "y");
      to->outputs() = {y, builder.cast(x, DType::kFloat64)};
    }
    const TensorType classes{DType::kInt64, {6, 5}};
    const auto resolve = [&] {
      return resolve_loss(graph, {}, &classes, [&](int64_t) { return std::optional<Graph>(more); });
    };
    if (time_first) {
      EXPECT_THROW(resolve(), Error);
    } else {
      EXPECT_EQ(resolve().labels_shape, (Shape{6, 5}));
    }
  }
}

}  // namespace
}  // namespace trainrt
