// Operators whose training form is more than one node's kernel: BatchNorm's way through the batch's
// moments, Dropout's independence of how a batch is cut.
#include <gtest/gtest.h>

#include <cmath>

#include "graph/evaluator.h"
#include "graph/graph_builder.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "tests/support/gradient_check.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

Tensor waves(Shape shape, double frequency) {
  std::vector<double> values(static_cast<size_t>(num_elements(shape)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(frequency * static_cast<double>(i)) + 0.3;
  }
  return Tensor::from(values, shape);
}

class BatchNormTest : public ::testing::Test {
 protected:
  ValueId parameter(const std::string& name, const Tensor& tensor) {
    Value value;
    value.name = name;
    value.type = {tensor.dtype(), tensor.shape()};
    value.kind = ValueKind::kParameter;
    feeds_[name] = tensor;
    return graph_.add_value(value);
  }
  void build(Attributes attributes, int opset, int num_outputs) {
    std::vector<std::string> names = {"y", "mean_out", "var_out", "saved_mean", "saved_var"};
    names.resize(static_cast<size_t>(num_outputs));
    for (const auto& [name, tensor] : {std::pair{"x", waves({4, 3, 5}, 0.7)},
                                       std::pair{"scale", waves({3}, 1.1)},
                                       std::pair{"bias", waves({3}, 2.1)},
                                       std::pair{"mean", waves({3}, 0.2)},
                                       std::pair{"var", waves({3}, 0.1)}}) {
      inputs_.push_back(parameter(name, tensor));
    }
    UpgradeContext context(
        graph_, "BatchNormalization", "", opset, "bn", inputs_, names, std::move(attributes));
    (*find_upgrade("", "BatchNormalization"))(context);
    results_ = context.results();
  }
  std::vector<double> fetch(ValueId id) const {
    return evaluate(graph_, feeds_, {id})[0].to_double();
  }

  Graph graph_;
  std::map<std::string, Tensor> feeds_;
  std::vector<ValueId> inputs_, results_;
};

TEST_F(BatchNormTest, GradientGoesThroughTheMomentsOfTheBatch) {
  build({{"training_mode", int64_t{1}}}, 15, 3);
  EXPECT_TRUE(gradients_match_finite_differences(
      graph_, {results_[0]}, {inputs_[0], inputs_[1], inputs_[2]}, feeds_));
}

TEST_F(BatchNormTest, TrainingNormalizesEachChannelToItsScaleAndBias) {
  build({{"training_mode", int64_t{1}}, {"epsilon", 0.0}}, 15, 3);
  const std::vector<double> y = fetch(results_[0]);
  for (size_t c = 0; c < 3; ++c) {
    double sum = 0, square = 0;
    for (size_t n = 0; n < 4; ++n) {
      for (size_t s = 0; s < 5; ++s) {
        const double value = y[(n * 3 + c) * 5 + s];
        sum += value / 20;
        square += value * value / 20;
      }
    }
    EXPECT_NEAR(sum, feeds_["bias"].to_double()[c], 1e-12);
    EXPECT_NEAR(std::sqrt(square - sum * sum), std::fabs(feeds_["scale"].to_double()[c]), 1e-12);
  }
}

TEST_F(BatchNormTest, RunningStatisticsMixInThePopulationVariance) {
  build({{"momentum", 0.9}}, 9, 5);  // five outputs mean training before opset 14
  const std::vector<double> x = feeds_["x"].to_double();
  double mean = 0, square = 0;
  for (size_t n = 0; n < 4; ++n) {
    for (size_t s = 0; s < 5; ++s) {
      mean += x[n * 15 + s] / 20;
      square += x[n * 15 + s] * x[n * 15 + s] / 20;
    }
  }
  EXPECT_NEAR(fetch(results_[1])[0], 0.9 * feeds_["mean"].to_double()[0] + 0.1 * mean, 1e-12);
  EXPECT_NEAR(fetch(results_[2])[0],
              0.9 * feeds_["var"].to_double()[0] + 0.1 * (square - mean * mean),
              1e-12);
}

TEST_F(BatchNormTest, RunningStatisticsBecomeStateThatTheStepUpdates) {
  build({{"training_mode", int64_t{1}}}, 15, 3);
  EXPECT_EQ(graph_.value(inputs_[3]).kind, ValueKind::kState);
  ASSERT_EQ(graph_.updates().size(), 2u);
  EXPECT_EQ(graph_.updates()[0].target, inputs_[3]);
  EXPECT_EQ(graph_.updates()[0].new_value, results_[1]);
}

TEST_F(BatchNormTest, InferenceUsesTheRunningStatistics) {
  build({{"epsilon", 0.0}}, 15, 1);
  const double expected = (feeds_["x"].to_double()[0] - feeds_["mean"].to_double()[0]) /
                              std::sqrt(feeds_["var"].to_double()[0]) *
                              feeds_["scale"].to_double()[0] +
                          feeds_["bias"].to_double()[0];
  EXPECT_NEAR(fetch(results_[0])[0], expected, 1e-12);
  EXPECT_TRUE(gradients_match_finite_differences(graph_, {results_[0]}, inputs_, feeds_));
}

class DropoutTest : public ::testing::Test {
 protected:
  static std::vector<double> drop(int64_t samples, uint64_t first_sample, uint64_t step) {
    Graph graph;
    GraphBuilder builder(graph);
    const Tensor ones = Tensor::from(std::vector<float>(static_cast<size_t>(samples * 1000), 1.0f),
                                     {samples, 10, 100});
    const ValueId y = builder.op("Dropout",
                                 {builder.constant(ones)},
                                 {{"ratio", 0.25},
                                  {"rng_stream", int64_t{3}},
                                  {"batch_axis", int64_t{0}},
                                  {"rows_per_sample", int64_t{1}}});
    EvaluateOptions options;
    options.reference_kernels = false;
    options.step = {.seed = 5, .step = step, .first_sample = first_sample};
    return evaluate(graph, {}, {y}, options)[0].to_double();
  }
};

TEST_F(DropoutTest, TwoMicroBatchesDrawWhatOneBatchDraws) {
  const std::vector<double> whole = drop(6, 0, 1);
  std::vector<double> parts = drop(2, 0, 1);
  const std::vector<double> rest = drop(4, 2, 1);
  parts.insert(parts.end(), rest.begin(), rest.end());
  EXPECT_EQ(parts, whole);
}

TEST_F(DropoutTest, StepsAndSamplesDrawDifferently) {
  EXPECT_NE(drop(1, 0, 1), drop(1, 0, 2));
  EXPECT_NE(drop(1, 0, 1), drop(1, 1, 1));
}

TEST_F(DropoutTest, KeepsTheShareItShouldAndScalesIt) {
  const std::vector<double> y = drop(20, 0, 1);
  double kept = 0;
  for (const double value : y) {
    EXPECT_TRUE(value == 0 || value == static_cast<double>(static_cast<float>(1 / 0.75)));
    kept += value != 0 ? 1 : 0;
  }
  // 20,000 draws: five standard deviations are 0.0153.
  EXPECT_NEAR(kept / static_cast<double>(y.size()), 0.75, 0.0153);
}

}  // namespace
}  // namespace trainrt::testing
