// The program as a user starts it: what it prints, writes and returns.
#include <gmock/gmock.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/run_program.h"
#include "tests/support/sequence_model.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

namespace fs = std::filesystem;
using testing::file_text;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_text;

class RunCommandTest : public ::testing::Test {
 protected:
  RunCommandTest() { write_text(model_, testing::tiny_model()); }

  ProgramResult run(std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"run", model_, "--loss", testing::kTinyLoss});
    return run_trainrt(arguments);
  }

  static std::vector<nlohmann::json> metrics(const std::string& path) {
    std::vector<nlohmann::json> lines;
    std::istringstream stream(file_text(path));
    std::string line;
    while (std::getline(stream, line)) {
      lines.push_back(nlohmann::json::parse(line));
    }
    return lines;
  }

  // Loss, learning rate and gradient norm of each step: what must be equal to the last bit.
  static std::vector<std::string> course(const std::string& path) {
    std::vector<std::string> steps;
    for (const nlohmann::json& line : metrics(path)) {
      steps.push_back(line["step"].dump() + " " + line["loss"].dump() + " " + line["lr"].dump() +
                      " " + line["grad_norm"].dump() + " " + line["samples"].dump());
    }
    return steps;
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("tiny.onnx");
};

TEST_F(RunCommandTest, SyntheticDataIsLearned) {
  const ProgramResult result =
      run({"--steps", "200", "--lr", "0.02", "--metrics", folder_.file("m.jsonl")});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("trained 200 steps (6400 samples)"));
  const auto lines = metrics(folder_.file("m.jsonl"));
  ASSERT_EQ(lines.size(), 200u);
  for (const char* key : {"step", "loss", "lr", "grad_norm", "samples", "step_seconds"}) {
    EXPECT_TRUE(lines[0].contains(key)) << key;
  }
  EXPECT_EQ(lines[0]["step"], 1);
  EXPECT_EQ(lines[0]["peak_bytes"].size(), 1u);
  EXPECT_LT(lines[199]["loss"].get<double>(), 0.5 * lines[0]["loss"].get<double>());
}

TEST_F(RunCommandTest, ARunRepeatsToTheLastBit) {
  ASSERT_EQ(run({"--steps", "20", "--metrics", folder_.file("a.jsonl")}).exit_code, 0);
  ASSERT_EQ(run({"--steps", "20", "--metrics", folder_.file("b.jsonl")}).exit_code, 0);
  EXPECT_EQ(course(folder_.file("a.jsonl")), course(folder_.file("b.jsonl")));
}

TEST_F(RunCommandTest, AResumedRunIsTheUninterruptedOne) {
  const std::vector<std::string> common = {
      "--lr-schedule", "cosine", "--warmup-steps", "3", "--optimizer", "adamw"};
  const auto with = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), common.begin(), common.end());
    const ProgramResult result = run(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  };
  const std::string whole = folder_.file("whole"), parts = folder_.file("parts");
  with({"--steps", "12", "--checkpoint-dir", whole, "--metrics", folder_.file("whole.jsonl")});
  // The schedule depends on the total, so the first part is cut by removing its later checkpoints.
  with({"--steps",
        "12",
        "--checkpoint-dir",
        parts,
        "--checkpoint-every",
        "5",
        "--metrics",
        folder_.file("parts.jsonl")});
  fs::remove_all(parts + "/step-00000012");
  fs::remove_all(parts + "/step-00000010");
  with({"--steps",
        "12",
        "--checkpoint-dir",
        parts,
        "--resume",
        "--metrics",
        folder_.file("parts.jsonl")});
  EXPECT_EQ(course(folder_.file("whole.jsonl")), course(folder_.file("parts.jsonl")));
  const std::string file = "/step-00000012/tensors-00000-of-00001.safetensors";
  EXPECT_FALSE(file_text(whole + file).empty());
  EXPECT_EQ(file_text(whole + file), file_text(parts + file));
}

TEST_F(RunCommandTest, ABrokenCheckpointIsPassedOverWithAWarning) {
  const std::string checkpoints = folder_.file("ck");
  ASSERT_EQ(
      run({"--steps", "4", "--checkpoint-dir", checkpoints, "--checkpoint-every", "2"}).exit_code,
      0);
  const std::string newest = checkpoints + "/step-00000004/tensors-00000-of-00001.safetensors";
  std::string bytes = file_text(newest);
  bytes[bytes.size() - 5] = static_cast<char>(bytes[bytes.size() - 5] ^ 1);
  write_text(newest, bytes);
  const ProgramResult result = run({"--steps", "6", "--checkpoint-dir", checkpoints, "--resume"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.err, HasSubstr("step-00000004' is passed over"));
  EXPECT_THAT(result.err, HasSubstr("resuming from " + checkpoints + "/step-00000002"));
}

TEST_F(RunCommandTest, CheckpointsOfAnotherRunAreNotOverwritten) {
  const std::string checkpoints = folder_.file("ck");
  ASSERT_EQ(run({"--steps", "2", "--checkpoint-dir", checkpoints}).exit_code, 0);
  const ProgramResult result = run({"--steps", "2", "--checkpoint-dir", checkpoints});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_THAT(result.err, HasSubstr("already holds a checkpoint of step 2"));
}

TEST_F(RunCommandTest, SeveralRanksGiveTheLossesOfOne) {
  const auto losses = [&](std::vector<std::string> split) {
    const std::string file = folder_.file("ranks.jsonl");
    split.insert(split.end(),
                 {"--steps", "6", "--precision", "fp64", "--threads", "1", "--metrics", file});
    const ProgramResult result = run(split);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return metrics(file);
  };
  const auto one = losses({});
  for (const std::vector<std::string>& split :
       std::vector<std::vector<std::string>>{{"--devices", "cpu:2", "--dp", "2"},
                                             {"--devices", "cpu:2", "--pp", "2"},
                                             {"--devices", "cpu:3", "--dp", "3"},
                                             {"--devices", "cpu:3", "--tp", "3"},
                                             {"--devices", "cpu:4", "--dp", "2", "--pp", "2"}}) {
    const auto many = losses(split);
    ASSERT_EQ(many.size(), one.size());
    for (size_t i = 0; i < one.size(); ++i) {
      EXPECT_NEAR(many[i]["loss"].get<double>(), one[i]["loss"].get<double>(), 1e-7) << split[1];
    }
    EXPECT_EQ(many[0]["peak_bytes"].size(), static_cast<size_t>(split[1].back() - '0'));
  }
}

TEST_F(RunCommandTest, ACheckpointOfOnePlanIsLoadedByAnother) {
  const std::string checkpoints = folder_.file("ck");
  const auto step = [&](const std::string& total, std::vector<std::string> split) {
    split.insert(split.end(),
                 {"--steps",
                  total,
                  "--checkpoint-dir",
                  checkpoints,
                  "--resume",
                  "--precision",
                  "fp64",
                  "--threads",
                  "1",
                  "--metrics",
                  folder_.file("moved.jsonl")});
    const ProgramResult result = run(split);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  };
  step("2", {"--devices", "cpu:2", "--pp", "2"});
  step("4", {"--devices", "cpu:2", "--dp", "2"});
  step("6", {});
  ASSERT_EQ(run({"--steps", "6", "--precision", "fp64", "--metrics", folder_.file("one.jsonl")})
                .exit_code,
            0);
  const auto moved = metrics(folder_.file("moved.jsonl")), one = metrics(folder_.file("one.jsonl"));
  ASSERT_EQ(moved.size(), one.size());
  for (size_t i = 0; i < one.size(); ++i) {
    EXPECT_NEAR(moved[i]["loss"].get<double>(), one[i]["loss"].get<double>(), 1e-7);
  }
}

TEST_F(RunCommandTest, SeveralMicroBatchesGiveTheGradientOfOne) {
  ASSERT_EQ(
      run({"--steps", "5", "--precision", "fp64", "--metrics", folder_.file("a.jsonl")}).exit_code,
      0);
  ASSERT_EQ(run({"--steps",
                 "5",
                 "--precision",
                 "fp64",
                 "--micro-batch-size",
                 "5",
                 "--metrics",
                 folder_.file("b.jsonl")})
                .exit_code,
            0);
  const auto a = metrics(folder_.file("a.jsonl")), b = metrics(folder_.file("b.jsonl"));
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_NEAR(a[i]["loss"].get<double>(), b[i]["loss"].get<double>(), 1e-6);
    EXPECT_NEAR(a[i]["grad_norm"].get<double>(), b[i]["grad_norm"].get<double>(), 1e-6);
  }
}

// The last batch has one sample, and so one shard where the others have eight.
TEST_F(RunCommandTest, ExactSumsOfAShortLastBatchLeaveTheStateAlone) {
  const std::string model = folder_.file("seq.onnxtxt"), data = folder_.file("data.npz");
  write_text(model, testing::sequence_model());
  testing::write_sequences(data, 33);
  const auto train = [&](std::vector<std::string> arguments) {
    const std::string file = folder_.file("m.jsonl");
    arguments.insert(
        arguments.begin(),
        {"run", model, "--data", data, "--epochs", "3", "--lr", "0.01", "--metrics", file});
    const ProgramResult result = run_trainrt(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return file;
  };
  for (const char* optimizer : {"adamw", "momentum"}) {
    const auto fast = metrics(train({"--optimizer", optimizer}));
    const std::string file = train({"--optimizer", optimizer, "--reduction", "exact"});
    const auto exact = metrics(file);
    const std::vector<std::string> one = course(file);
    ASSERT_EQ(exact.size(), 6u);
    for (size_t i = 0; i < exact.size(); ++i) {
      const double loss = fast[i]["loss"];
      EXPECT_NEAR(exact[i]["loss"].get<double>(), loss, 3e-6 * loss) << optimizer << " " << i;
    }
    EXPECT_EQ(one,
              course(train({"--optimizer",
                            optimizer,
                            "--reduction",
                            "exact",
                            "--devices",
                            "cpu:2",
                            "--dp",
                            "2",
                            "--zero",
                            "1"})));
  }
}

TEST_F(RunCommandTest, DropoutDrawsTheSameInEverySplit) {
  // Samples of three rows each, merged before Dropout.
  write_text(model_,
             "<ir_version: 8, opset_import: [\"\" : 17]>\n"
             "g (float[N, 3, 4] x) => (float[N, 3] y)\n"
             "<float[4, 2] w = {0.1, 0.2, -0.3, 0.4, -0.5, 0.6, 0.7, -0.8}, float half = {0.5},\n"
             " bool on = {1}, int64[2] flat = {-1, 4}, int64[3] apart = {-1, 3, 2},\n"
             " float[6, 3] v = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0},\n"
             " int64[2] join = {-1, 6}>\n"
             "{\n"
             "  rows = Reshape(x, flat)\n  h = MatMul(rows, w)\n  d = Dropout(h, half, on)\n"
             "  a = Reshape(d, apart)\n  j = Reshape(a, join)\n  y = MatMul(j, v)\n"
             "}\n");
  const auto losses = [&](std::vector<std::string> split) {
    const std::string file = folder_.file("drop.jsonl");
    split.insert(split.end(),
                 {"--steps", "4", "--precision", "fp64", "--threads", "1", "--metrics", file});
    const ProgramResult result = run(split);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::vector<double> list;
    for (const nlohmann::json& line : metrics(file)) {
      list.push_back(line["loss"].get<double>());
    }
    return list;
  };
  const std::vector<double> whole = losses({"--micro-batch-size", "32"});
  for (const std::vector<std::string>& split :
       std::vector<std::vector<std::string>>{{"--micro-batch-size", "1"},
                                             {"--micro-batch-size", "5"},
                                             {"--devices", "cpu:2", "--dp", "2"}}) {
    const std::vector<double> parts = losses(split);
    ASSERT_EQ(parts.size(), whole.size());
    for (size_t i = 0; i < whole.size(); ++i) {
      EXPECT_NEAR(parts[i], whole[i], 1e-6 * whole[i]) << split[0] << " " << split[1];
    }
  }
}

TEST_F(RunCommandTest, LabelsThatTheModelMakesOfShapesCount) {
  // The loss of zero weights over three classes is ln 3, in every split.
  write_text(model_,
             "<ir_version: 8, opset_import: [\"\" : 17]>\n"
             "g (float[N, 4] x) => (float loss)\n"
             "<float[4, 3] w = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}>\n"
             "{\n"
             "  h = MatMul(x, w)\n  n = Shape<start = 0, end = 1>(x)\n"
             "  labels = ConstantOfShape<value = int64[1] {1}>(n)\n"
             "  loss = SoftmaxCrossEntropyLoss(h, labels)\n"
             "}\n");
  for (const std::string micro_batch : {"8", "3"}) {
    const std::string file = folder_.file("m.jsonl");
    const ProgramResult result = run_trainrt({"run",
                                              model_,
                                              "--batch-size",
                                              "8",
                                              "--micro-batch-size",
                                              micro_batch,
                                              "--steps",
                                              "2",
                                              "--metrics",
                                              file});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    EXPECT_NEAR(metrics(file).at(0)["loss"].get<double>(), std::log(3.0), 1e-6);
  }
}

}  // namespace
}  // namespace trainrt
