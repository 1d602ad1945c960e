// What was exported for evaluation is trained as it stands: BatchNorm keeps its statistics, Dropout
// is off. What was exported for training trains with batch statistics, which the running ones
// follow, and with Dropout. Evaluation takes the inference form of both.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "graph/training_graph.h"
#include "tests/graph/onnx_models.h"
#include "tests/support/training_loop.h"

namespace trainrt {
namespace {

using testing::at_batch;
using ::testing::Contains;
using testing::model_of;
using testing::names_of_kind;
using ::testing::Not;
using testing::op_types;

constexpr int64_t kBatch = 4;

// x -> BatchNormalization -> Dropout -> y, as exporters write it in either mode.
OnnxModel exported(bool training, int opset = 17) {
  const std::string mode = training ? "1" : "0";
  const std::string norm =
      training ? "n, mean, var = BatchNormalization<training_mode = 1>(x, s, b, m, v)"
               : "n = BatchNormalization(x, s, b, m, v)";
  return model_of("(float[N, 2] x) => (float[N, 2] y)",
                  "float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] m = {0.5, -0.5}, "
                  "float[2] v = {4, 4}, float half = {0.5}, bool on = {" +
                      mode + "}",
                  norm + "\ny = Dropout(n, half, on)",
                  opset);
}

Tensor samples() {
  return Tensor::from<float>({1, 2, 3, 4, 5, 6, 7, 8}, {kBatch, 2});
}

// The running statistics after one step.
std::pair<std::vector<double>, std::vector<double>> statistics_after_a_step(
    const OnnxModel& model) {
  Graph graph = model.bind(at_batch(kBatch));
  TrainingSpec spec;
  LossSpec wanted;
  wanted.kind = "mse";
  spec.loss = resolve_loss(graph, wanted, nullptr);
  testing::TrainingLoop loop(build_training_graph(std::move(graph), spec));
  loop.step({{{"x", samples()}, {"labels", samples()}}}, 0.01);
  return {loop.value("m").to_double(), loop.value("v").to_double()};
}

TEST(TrainingModeTest, AnEvalExportKeepsItsStatisticsAndDropsNothing) {
  const OnnxModel model = exported(false);
  const Graph graph = model.bind(at_batch(kBatch));
  EXPECT_THAT(op_types(graph), Not(Contains("Dropout")));
  EXPECT_THAT(op_types(graph), Not(Contains("BatchNormMoments")));
  EXPECT_THAT(names_of_kind(graph, ValueKind::kParameter), ::testing::ElementsAre("s", "b"));
  const Tensor y = evaluate(graph, {{"x", samples()}}, graph.outputs())[0];
  EXPECT_NEAR(y.to_double()[0], (1 - 0.5) / 2, 1e-4);  // by the running statistics
  const auto [mean, variance] = statistics_after_a_step(model);
  EXPECT_THAT(mean, ::testing::ElementsAre(0.5, -0.5));
  EXPECT_THAT(variance, ::testing::ElementsAre(4, 4));
}

TEST(TrainingModeTest, ATrainingExportNormalizesByTheBatchAndFollowsIt) {
  const OnnxModel model = exported(true);
  const Graph graph = model.bind(at_batch(kBatch));
  EXPECT_THAT(op_types(graph), Contains("Dropout"));
  EXPECT_THAT(names_of_kind(graph, ValueKind::kState), ::testing::ElementsAre("m", "v"));
  // Batch mean (4, 5); ONNX's momentum 0.9 keeps nine parts of the old.
  const auto [mean, variance] = statistics_after_a_step(model);
  EXPECT_NEAR(mean[0], 0.9 * 0.5 + 0.1 * 4, 1e-6);
  EXPECT_NEAR(mean[1], 0.9 * -0.5 + 0.1 * 5, 1e-6);
  EXPECT_NE(variance[0], 4);
}

TEST(TrainingModeTest, EvaluationOfATrainingExportIsThatOfTheEvalExport) {
  BindOptions options = at_batch(kBatch);
  options.training = false;
  const Graph trained = exported(true).bind(options), evaluated = exported(false).bind(options);
  EXPECT_EQ(op_types(trained), op_types(evaluated));
  EXPECT_EQ(evaluate(trained, {{"x", samples()}}, trained.outputs())[0].to_double(),
            evaluate(evaluated, {{"x", samples()}}, evaluated.outputs())[0].to_double());
}

TEST(TrainingModeTest, OlderOpsetsSayTheModeInTheirOwnWays) {
  // Opset 9: extra outputs mean training, Dropout always drops. Opset 6: is_test.
  const std::string inputs = "(float[N, 2] x) => (float[N, 2] y)";
  const std::string weights =
      "float[2] s = {1, 1}, float[2] b = {0, 0}, float[2] m = {0, 0}, float[2] v = {1, 1}";
  const auto types = [&](const std::string& body, int opset) {
    return op_types(model_of(inputs, weights, body, opset).bind(at_batch(kBatch)));
  };
  EXPECT_THAT(types("n, mean, var, a, c = BatchNormalization(x, s, b, m, v)\ny = Dropout(n)", 9),
              ::testing::AllOf(Contains("BatchNormMoments"), Contains("Dropout")));
  EXPECT_THAT(types("y = BatchNormalization(x, s, b, m, v)", 9), Not(Contains("BatchNormMoments")));
  EXPECT_THAT(types("n = BatchNormalization<is_test = 1>(x, s, b, m, v)\n"
                    "y = Dropout<is_test = 1>(n)",
                    6),
              ::testing::AllOf(Not(Contains("BatchNormMoments")), Not(Contains("Dropout"))));
}

}  // namespace
}  // namespace trainrt
