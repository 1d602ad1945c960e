// What a loss inside the model, and labels outside of it, make of the samples.
#include "graph/scalar_loss.h"

#include <gmock/gmock.h>

#include "graph/training_graph.h"
#include "tests/graph/onnx_models.h"

namespace trainrt {
namespace {

using testing::at_batch;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::model_of;
using ::testing::Not;

ScalarLoss described(const std::string& body) {
  const Graph graph = model_of("(float[N, 4] x) => (float loss)",
                               "float[4, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3}",
                               "h = MatMul(x, w)\n" + body)
                          .bind(at_batch(6));
  return describe_scalar_loss(graph, *graph.find_value("loss"));
}

const std::string kAxis0 = "axes = Constant<value = int64[1] {0}>()\n";

TEST(ScalarLossTest, AMeanOverSamplesNeedsNoWord) {
  const ScalarLoss loss = described("loss = ReduceMean<keepdims = 0>(h)");
  EXPECT_FALSE(loss.sums_samples);
  EXPECT_THAT(loss.warning, IsEmpty());
}

TEST(ScalarLossTest, OnlyASumOverSamplesIsOne) {
  EXPECT_TRUE(described("loss = ReduceSum<keepdims = 0>(h)").sums_samples);
  // Sums over features of what was averaged or summed over the samples, and of two means.
  for (const std::string body :
       {"m = ReduceMean<axes = [0], keepdims = 0>(h)\nloss = ReduceSum<keepdims = 0>(m)",
        "m = ReduceLogSumExp<axes = [0], keepdims = 0>(h)\nloss = ReduceSum<keepdims = 0>(m)",
        "a = ReduceMean<keepdims = 1>(h)\nb = ReduceMean<keepdims = 1>(x)\n"
        "c = Concat<axis = 0>(a, b)\nloss = ReduceSum<keepdims = 0>(c)"}) {
    const ScalarLoss loss = described(body);
    EXPECT_FALSE(loss.sums_samples) << body;
    EXPECT_THAT(loss.warning, HasSubstr("no mean over samples")) << body;
  }
}

TEST(ScalarLossTest, AMeanOfWhatWasReducedOverSamplesIsNoMeanOverThem) {
  for (const std::string op : {"ReduceSum", "ReduceMax"}) {
    const std::string reduce = op == "ReduceSum" ? kAxis0 + "m = ReduceSum<keepdims = 0>(h, axes)\n"
                                                 : "m = ReduceMax<axes = [0], keepdims = 0>(h)\n";
    EXPECT_THAT(described(reduce + "loss = ReduceMean<keepdims = 0>(m)").warning,
                HasSubstr("no mean over samples"));
  }
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

}  // namespace
}  // namespace trainrt
