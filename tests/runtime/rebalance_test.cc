// --rebalance in whole runs. Times are told to it, so nothing here depends on a clock: a device
// whose speed changes is a function of rank and step.
#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/trainer.h"
#include "tests/support/run_program.h"
#include "tests/support/sequence_model.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

using ::testing::ElementsAre;
using testing::file_text;
using testing::TemporaryFolder;
using testing::write_text;
using Words = std::vector<std::string>;

// Rank 0 takes three times as long from the tenth step on.
double slows(int rank, int64_t step, int64_t work) {
  return static_cast<double>(work) * (rank == 0 && step >= 10 ? 0.03 : 0.01);
}

class RebalanceTest : public ::testing::Test {
 protected:
  RebalanceTest() { write_text(model_, testing::tiny_model()); }

  std::vector<nlohmann::json> run(const Words& more, const Words& model_words = {}) {
    const std::string file = folder_.file("m.jsonl");
    Words words = model_words.empty() ? Words{model_, "--loss", testing::kTinyLoss, "--steps", "30"}
                                      : model_words;
    words.insert(words.end(), {"--threads", "1", "--metrics", file});
    words.insert(words.end(), more.begin(), more.end());
    const Options options = parse_options(
        "run", kDataOptions | kTrainingOptions | kPlanOptions | kRunOptions | kTraceOptions, words);
    EXPECT_EQ(train(options, {slows}), 0);
    std::vector<nlohmann::json> steps;
    std::istringstream stream(file_text(file));
    for (std::string line; std::getline(stream, line);) {
      steps.push_back(nlohmann::json::parse(line));
    }
    return steps;
  }

  static std::vector<int64_t> shares(const nlohmann::json& step) {
    return step["shares"].get<std::vector<int64_t>>();
  }
  static void expect_losses(const std::vector<nlohmann::json>& a,
                            const std::vector<nlohmann::json>& b,
                            double bound) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      const double loss = a[i]["loss"].get<double>();
      EXPECT_NEAR(loss, b[i]["loss"].get<double>(), bound * loss) << "step " << i + 1;
    }
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("tiny.onnx");
};

TEST_F(RebalanceTest, MicroBatchesMoveToTheFasterRankAndTheLossStays) {
  for (const Words& split : {Words{"--devices", "cpu:2", "--dp", "2"},
                             Words{"--devices", "cpu:2", "--dp", "2", "--zero", "3"},
                             Words{"--devices", "cpu:4", "--dp", "2", "--pp", "2"}}) {
    Words words = split;
    words.insert(words.end(), {"--micro-batch-size", "4", "--precision", "fp64"});
    const auto still = run(words);
    words.push_back("--rebalance");
    const auto moved = run(words);
    EXPECT_THAT(shares(moved.front()), ElementsAre(4, 4));
    EXPECT_THAT(shares(moved.back()), ElementsAre(2, 6));
    expect_losses(still, moved, 1e-12);
  }
}

TEST_F(RebalanceTest, UnderExactReductionTheBitsStay) {
  const Words words = {"--devices", "cpu:2", "--dp", "2", "--reduction", "exact"};
  const auto still = run(words);
  Words rebalanced = words;
  rebalanced.push_back("--rebalance");
  const auto moved = run(rebalanced);
  EXPECT_THAT(shares(moved.front()), ElementsAre(4, 4));
  EXPECT_THAT(shares(moved.back()), ElementsAre(2, 6));
  ASSERT_EQ(still.size(), moved.size());
  for (size_t i = 0; i < still.size(); ++i) {
    EXPECT_EQ(still[i]["loss"], moved[i]["loss"]) << "step " << i + 1;
    EXPECT_EQ(still[i]["grad_norm"], moved[i]["grad_norm"]) << "step " << i + 1;
  }
}

TEST_F(RebalanceTest, SharesThatMemoryDoesNotHoldAreNotTaken) {
  // Without micro-batches a larger share is a larger batch at once.
  const Words words = {"--devices", "cpu:2", "--dp", "2", "--shares", "16,16", "--rebalance"};
  const auto free = run(words);
  ASSERT_THAT(shares(free.front()), ElementsAre(16, 16));
  EXPECT_THAT(shares(free.back()), ElementsAre(8, 24));
  const auto peak = free.front()["peak_bytes"].get<std::vector<int64_t>>();
  EXPECT_GT(free.back()["peak_bytes"][1].get<int64_t>(), peak[1]);
  const std::string cluster = folder_.file("cluster.yaml");
  write_text(cluster,
             "hosts:\n  - {count: 1, devices: [{count: 2, type: cpu, memory: " +
                 std::to_string(peak[1]) + "}]}\n");
  const auto limited = run({"--cluster", cluster, "--dp", "2", "--shares", "16,16", "--rebalance"});
  EXPECT_THAT(shares(limited.back()), ElementsAre(16, 16));
  expect_losses(free, limited, 1e-6);
}

TEST_F(RebalanceTest, SharesThatLeaveNothingToMoveAreTold) {
  const std::string plan = folder_.file("plan.json");
  write_text(plan,
             R"({"shares": [{"data_rank": 0, "num_samples": 4, "micro_batch_size": 4},
                            {"data_rank": 1, "num_samples": 8, "micro_batch_size": 4}]})");
  ::testing::internal::CaptureStderr();
  run({"--devices", "cpu:2", "--batch-size", "12", "--plan", plan, "--rebalance"});
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              ::testing::HasSubstr("shares are 1, 2 micro-batches and each keeps 1, so there is "
                                   "but one to move"));
}

TEST_F(RebalanceTest, TokensMoveToo) {
  const std::string model = folder_.file("sequence.onnx"), data = folder_.file("sequences.npz");
  write_text(model, testing::sequence_model());
  testing::write_sequences(data, 96);
  const Words words = {model,
                       "--data",
                       data,
                       "--bind",
                       "S=16",
                       "--epochs",
                       "20",
                       "--batch-size",
                       "48",
                       "--precision",
                       "fp64",
                       "--devices",
                       "cpu:2",
                       "--dp",
                       "2",
                       "--max-tokens",
                       "32"};
  const auto still = run({}, words);
  const auto moved = run({"--rebalance"}, words);
  expect_losses(still, moved, 1e-10);
  const auto tokens = [](const nlohmann::json& step, size_t rank) {
    return step["padded_tokens"][rank].get<double>();
  };
  EXPECT_GT(tokens(moved.front(), 0), 0.8 * tokens(moved.front(), 1));
  EXPECT_LT(tokens(moved.back(), 0), 0.6 * tokens(moved.back(), 1));
}

}  // namespace
}  // namespace trainrt
