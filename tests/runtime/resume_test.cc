// Runs that are continued with other settings than they began with.
#include <gmock/gmock.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "graph/evaluator.h"
#include "graph/onnx_import.h"
#include "runtime/checkpoint.h"
#include "tests/support/idx_file.h"
#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::ProgramResult;
using testing::run_trainrt;

class ResumeTest : public ::testing::Test {
 protected:
  ResumeTest() { testing::write_text(model_, testing::tiny_model()); }

  ProgramResult run(std::vector<std::string> arguments) {
    std::vector<std::string> words = {
        "run", model_, "--loss", "mse", "--checkpoint-dir", checkpoints_, "--threads", "1"};
    words.insert(words.end(), arguments.begin(), arguments.end());
    const ProgramResult result = run_trainrt(words);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result;
  }

  static std::vector<double> weight(const std::string& file, const std::string& name) {
    const Graph graph = OnnxModel::load(file).bind({});
    return initial_value(graph.value(*graph.find_value(name))).to_double();
  }

  testing::TemporaryFolder folder_;
  std::string model_ = folder_.file("tiny.onnx");
  std::string checkpoints_ = folder_.file("ck");
};

TEST_F(ResumeTest, WeightsFrozenLaterStayAsTheyWereTrained) {
  const std::string trained = folder_.file("a.onnx"), frozen = folder_.file("b.onnx"),
                    again = folder_.file("c.onnx");
  run({"--steps", "20", "--lr", "0.1", "--export", trained});
  const std::vector<double> w1 = weight(trained, "w1");
  ASSERT_NE(w1, weight(model_, "w1"));
  run({"--steps", "22", "--lr", "0.1", "--freeze", "?1", "--resume", "--export", frozen});
  EXPECT_EQ(weight(frozen, "w1"), w1);
  EXPECT_NE(weight(frozen, "w2"), weight(trained, "w2"));
  EXPECT_EQ(Checkpoint::newest(checkpoints_)->read("w1").to_double(), w1);
  // On two ranks, and through a second checkpoint that was written while they were frozen.
  run({"--steps",
       "23",
       "--freeze",
       "?1",
       "--resume",
       "--devices",
       "cpu:2",
       "--dp",
       "2",
       "--export",
       again});
  EXPECT_EQ(weight(again, "w1"), w1);
}

TEST_F(ResumeTest, TheLossGoesOnFromTheTrainedWeightsAlthoughTheyAreFrozen) {
  const auto first_loss = [&](std::vector<std::string> arguments) {
    const std::string file = folder_.file("m.jsonl");
    arguments.insert(arguments.end(), {"--resume", "--metrics", file});
    run(arguments);
    const std::string text = testing::file_text(file);
    return nlohmann::json::parse(text.substr(text.rfind("{")))["loss"].get<double>();
  };
  run({"--steps", "20", "--lr", "0.1"});
  const double frozen = first_loss({"--steps", "21", "--lr", "0", "--freeze", "?1"});
  std::filesystem::remove_all(checkpoints_ + "/step-00000021");
  EXPECT_NEAR(first_loss({"--steps", "21", "--lr", "0"}), frozen, 1e-6 * frozen);
}

TEST_F(ResumeTest, WeightsFrozenFromTheBeginningCanBeTrainedLater) {
  const std::string trained = folder_.file("a.onnx");
  run({"--steps", "3", "--freeze", "?1"});
  const ProgramResult result =
      run({"--steps", "6", "--lr", "0.1", "--resume", "--export", trained});
  EXPECT_THAT(result.err, HasSubstr("not trained so far"));
  EXPECT_NE(weight(trained, "w1"), weight(model_, "w1"));
}

TEST_F(ResumeTest, OtherSettingsAreNamedOneByOne) {
  run({"--steps", "2", "--seed", "3"});
  const ProgramResult same = run({"--steps", "3", "--seed", "3", "--resume"});
  EXPECT_THAT(same.err, Not(HasSubstr("resuming with another")));
  const ProgramResult other = run({"--steps",
                                   "4",
                                   "--seed",
                                   "3",
                                   "--batch-size",
                                   "16",
                                   "--lr-schedule",
                                   "cosine",
                                   "--reduction",
                                   "exact",
                                   "--batch-norm",
                                   "sync",
                                   "--resume"});
  EXPECT_THAT(other.err, HasSubstr("another --batch-size: 32 -> 16"));
  EXPECT_THAT(other.err, HasSubstr("another --lr-schedule: constant -> cosine"));
  EXPECT_THAT(other.err, HasSubstr("another --reduction: fast -> exact"));
  EXPECT_THAT(other.err, HasSubstr("another --batch-norm: local -> sync"));
}

struct Refused {
  const char* name;
  std::vector<std::string> before, now;
  const char* says;
};

class RefusedResumeTest : public ResumeTest, public ::testing::WithParamInterface<Refused> {};

TEST_P(RefusedResumeTest, NamesBothValues) {
  std::vector<std::string> begun = GetParam().before;
  begun.insert(begun.end(), {"--steps", "2"});
  run(begun);
  std::vector<std::string> words = {
      "run", model_, "--loss", "mse", "--checkpoint-dir", checkpoints_, "--resume"};
  words.insert(words.end(), GetParam().now.begin(), GetParam().now.end());
  const ProgramResult result = run_trainrt(words);
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr(GetParam().says));
}

INSTANTIATE_TEST_SUITE_P(
    Settings,
    RefusedResumeTest,
    ::testing::Values(
        Refused{"Optimizer",
                {"--optimizer", "adam"},
                {"--optimizer", "adamw"},
                "--optimizer adam, this run's is adamw"},
        Refused{"Seed", {"--seed", "3"}, {"--seed", "4"}, "--seed 3, this run's is 4"},
        Refused{"SeedLeftOut", {"--seed", "3"}, {}, "--seed 3, this run's is 0"},
        Refused{
            "Delayed", {"--schedule", "2bw"}, {"--steps", "3"}, "was trained with --schedule 2bw"},
        Refused{"NotDelayed", {}, {"--schedule", "2bw"}, "was trained without --schedule 2bw"}),
    [](const auto& row) { return std::string(row.param.name); });

TEST_F(ResumeTest, OldCheckpointsGoAndTheOneInUseWhenItsRunEnds) {
  const std::string trained = folder_.file("a.onnx"), frozen = folder_.file("b.onnx");
  run({"--steps", "10", "--checkpoint-every", "2", "--checkpoint-keep", "2", "--export", trained});
  EXPECT_THAT(checkpoint_steps(checkpoints_), ElementsAre(8, 10));
  // Weights that are frozen now are read from the checkpoint at every save.
  run({"--steps",
       "16",
       "--checkpoint-every",
       "2",
       "--checkpoint-keep",
       "1",
       "--freeze",
       "?1",
       "--resume",
       "--export",
       frozen});
  EXPECT_THAT(checkpoint_steps(checkpoints_), ElementsAre(16));
  EXPECT_EQ(Checkpoint::newest(checkpoints_)->read("w1").to_double(), weight(trained, "w1"));
  run({"--steps", "17", "--resume"});
  EXPECT_THAT(checkpoint_steps(checkpoints_), ElementsAre(16, 17));
}

TEST_F(ResumeTest, DataWithoutAnEndAreCalledEndless) {
  testing::write_idx_folder(folder_.file("data"),
                            "train",
                            std::vector<std::vector<float>>(5, std::vector<float>(4, 0.5f)),
                            {0, 1, 2, 0, 1});
  run({"--steps", "1"});
  const ProgramResult result = run_trainrt({"run",
                                            model_,
                                            "--data",
                                            folder_.file("data"),
                                            "--steps",
                                            "1",
                                            "--checkpoint-dir",
                                            checkpoints_,
                                            "--resume"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("another number of samples: endless -> 5"));
}

TEST_F(ResumeTest, AnExportMayLieBesideTheCheckpoints) {
  run({"--steps", "1", "--export", checkpoints_ + "/last.onnx"});
  EXPECT_NE(weight(checkpoints_ + "/last.onnx", "w1"), weight(model_, "w1"));
  run({"--steps", "2", "--resume", "--export", checkpoints_ + "/last.onnx"});
}

TEST_F(ResumeTest, AFinishedRunSaysSo) {
  run({"--steps", "2"});
  const ProgramResult result = run({"--steps", "2", "--resume"});
  EXPECT_THAT(result.out, HasSubstr("nothing left to train: 2 of 2 steps are done"));
  EXPECT_THAT(result.out, Not(HasSubstr("last loss")));
}

}  // namespace
}  // namespace trainrt
