// Mixed precision in whole runs: every family trains in 16 bits close to float32, and float16's
// loss scale follows the documented rule step by step.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt {
namespace {

using testing::file_text;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_text;

using Lines = std::vector<nlohmann::json>;

Lines metrics(const std::string& path) {
  Lines lines;
  std::istringstream stream(file_text(path));
  std::string line;
  while (std::getline(stream, line)) {
    lines.push_back(nlohmann::json::parse(line));
  }
  return lines;
}

struct Family {
  std::string name;
  std::vector<std::string> model;     // arguments of `trainrt model`
  std::vector<std::string> run = {};  // and of `trainrt run`
};

class PrecisionFamilyTest : public ::testing::TestWithParam<Family> {};

TEST_P(PrecisionFamilyTest, SixteenBitsReachTheLossOfFloat32) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx");
  std::vector<std::string> arguments = {"model"};
  arguments.insert(arguments.end(), GetParam().model.begin(), GetParam().model.end());
  arguments.insert(arguments.end(), {"-o", model});
  ASSERT_EQ(run_trainrt(arguments).exit_code, 0);
  const auto last_loss = [&](const std::string& precision) {
    const std::string file = folder.file(precision + ".jsonl");
    std::vector<std::string> words = {"run", model, "--steps", "6", "--batch-size", "4"};
    words.insert(words.end(), {"--precision", precision, "--metrics", file});
    words.insert(words.end(), GetParam().run.begin(), GetParam().run.end());
    if (precision == "fp16") {
      words.insert(words.end(), {"--init-scale", "1024"});
    }
    const ProgramResult result = run_trainrt(words);
    EXPECT_EQ(result.exit_code, 0) << precision << ": " << result.err;
    const Lines lines = metrics(file);
    EXPECT_EQ(lines.size(), 6u) << precision;
    return lines.empty() ? NAN : lines.back()["loss"].get<double>();
  };
  const double full = last_loss("fp32");
  EXPECT_NEAR(last_loss("bf16"), full, 0.02 * full);
  EXPECT_NEAR(last_loss("fp16"), full, 0.01 * full);
}

INSTANTIATE_TEST_SUITE_P(
    Families,
    PrecisionFamilyTest,
    ::testing::Values(Family{"mlp", {"mlp", "--hidden", "32"}},
                      // BatchNorm over four images magnifies roundings: at the default rate by
                      // as much as 6 %, depending on the seed.
                      Family{"cnn", {"cnn"}, {"--lr", "1e-4"}},
                      Family{"gpt2",
                             {"gpt2",
                              "--layers",
                              "2",
                              "--hidden",
                              "32",
                              "--heads",
                              "4",
                              "--vocab",
                              "61",
                              "--seq",
                              "16"}},
                      Family{"llama",
                             {"llama",
                              "--layers",
                              "2",
                              "--hidden",
                              "32",
                              "--heads",
                              "4",
                              "--kv-heads",
                              "2",
                              "--ffn",
                              "48",
                              "--vocab",
                              "61",
                              "--seq",
                              "16"}},
                      Family{"bert",
                             {"bert",
                              "--layers",
                              "2",
                              "--hidden",
                              "32",
                              "--heads",
                              "4",
                              "--vocab",
                              "61",
                              "--seq",
                              "16"}},
                      Family{"t5",
                             {"t5",
                              "--layers",
                              "1",
                              "--hidden",
                              "32",
                              "--heads",
                              "4",
                              "--vocab",
                              "61",
                              "--seq",
                              "8"}},
                      Family{"lstm", {"lstm", "--hidden", "16", "--vocab", "61", "--seq", "8"}}),
    [](const ::testing::TestParamInfo<Family>& param) { return param.param.name; });

class LossScaleRunTest : public ::testing::Test {
 protected:
  LossScaleRunTest() { write_text(model_, testing::tiny_model()); }

  // float16 with a scale that must overflow at first, and again after each growth.
  Lines run(const std::string& name, std::vector<std::string> more) {
    const std::string file = folder_.file(name + ".jsonl");
    std::vector<std::string> arguments = {"run",
                                          model_,
                                          "--loss",
                                          testing::kTinyLoss,
                                          "--precision",
                                          "fp16",
                                          "--init-scale",
                                          "1048576",
                                          "--growth-interval",
                                          "3",
                                          "--lr-schedule",
                                          "linear",
                                          "--metrics",
                                          file};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramResult result = run_trainrt(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return metrics(file);
  }

  // The rule, given which steps overflow: halved by an overflow, doubled after three steps without.
  static void expect_scales_by_the_rule(const Lines& lines) {
    double scale = 1048576;
    int finite = 0;
    for (const nlohmann::json& line : lines) {
      EXPECT_EQ(line["loss_scale"], scale) << line;
      if (line["skipped"]) {
        scale /= 2;
        finite = 0;
      } else if (++finite == 3) {
        scale *= 2;
        finite = 0;
      }
    }
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("tiny.onnx");
};

TEST_F(LossScaleRunTest, TheTraceFollowsTheRule) {
  const Lines lines = run("one", {"--steps", "40"});
  ASSERT_EQ(lines.size(), 40u);
  expect_scales_by_the_rule(lines);
  const double first_lr = lines[0]["lr"];
  int skipped = 0;
  for (const nlohmann::json& line : lines) {
    // A skipped step does not advance the schedule: the next one has its learning rate.
    const double updates = line["step"].get<double>() - 1 - skipped;
    EXPECT_NEAR(line["lr"].get<double>(), first_lr * (1 - updates / 40), 1e-12) << line;
    skipped += line["skipped"] ? 1 : 0;
  }
  EXPECT_GT(skipped, 2);
  EXPECT_LT(skipped, 30);
}

// Which steps overflow depends on how much each rank sums in 16 bits; what follows does not, and an
// overflow on one rank is one on all.
TEST_F(LossScaleRunTest, RanksFollowTheRuleTogether) {
  for (const std::vector<std::string>& layout :
       {std::vector<std::string>{"--devices", "cpu:2", "--dp", "2"},
        {"--devices", "cpu:4", "--dp", "4"},
        {"--devices", "cpu:4", "--dp", "4", "--zero", "2"}}) {
    std::vector<std::string> arguments = {"--steps", "24"};
    arguments.insert(arguments.end(), layout.begin(), layout.end());
    const Lines many = run("many", arguments);
    ASSERT_EQ(many.size(), 24u);
    expect_scales_by_the_rule(many);
    EXPECT_TRUE(many[0]["skipped"]);
  }
}

TEST_F(LossScaleRunTest, AResumedRunHasTheSameTrace) {
  run("whole", {"--steps", "20"});
  const std::string checkpoints = folder_.file("ck");
  run("parts", {"--steps", "20", "--checkpoint-dir", checkpoints, "--checkpoint-every", "7"});
  std::filesystem::remove_all(checkpoints + "/step-00000020");
  std::filesystem::remove_all(checkpoints + "/step-00000014");
  run("parts", {"--steps", "20", "--checkpoint-dir", checkpoints, "--resume"});
  const Lines whole = metrics(folder_.file("whole.jsonl"));
  const Lines parts = metrics(folder_.file("parts.jsonl"));
  ASSERT_EQ(whole.size(), parts.size());
  for (size_t i = 0; i < whole.size(); ++i) {
    for (const char* key : {"step", "loss", "lr", "grad_norm", "loss_scale", "skipped"}) {
      EXPECT_EQ(whole[i][key], parts[i][key]) << "step " << i + 1 << ", " << key;
    }
  }
}

// Numbers of some batches are beyond float16's range, whatever the scale of the loss. As under
// PyTorch's GradScaler the step is skipped, and the training goes on.
TEST_F(LossScaleRunTest, AnOverflowOfTheForwardPassSkipsTheStep) {
  write_text(model_,
             "<ir_version: 8, opset_import: [\"\" : 17]>\n"
             "wide (float[N, 4] x) => (float[N, 2] y)\n"
             "<float[4, 2] w1 = {9e3, 2e4, 1e4, 1e4, -8e3, 1e4, 2e4, -1e4},\n"
             " float[2, 2] w2 = {1e-5, -1e-5, 2e-5, 1e-5}>\n"
             "{\n  h = MatMul(x, w1)\n  r = Relu(h)\n  y = MatMul(r, w2)\n}\n");
  for (const char* devices : {"cpu:1", "cpu:2"}) {
    const Lines lines = run(
        "wide", {"--steps", "40", "--batch-size", "8", "--init-scale", "1", "--devices", devices});
    ASSERT_EQ(lines.size(), 40u);
    int overflows = 0;
    for (size_t i = 0; i + 1 < lines.size(); ++i) {
      const double ratio =
          lines[i + 1]["loss_scale"].get<double>() / lines[i]["loss_scale"].get<double>();
      EXPECT_EQ(ratio == 0.5, lines[i]["skipped"].get<bool>()) << lines[i];
      EXPECT_TRUE(!lines[i]["loss"].is_null() || lines[i]["skipped"].get<bool>()) << lines[i];
      overflows += lines[i]["loss"].is_null() ? 1 : 0;
    }
    EXPECT_GT(overflows, 1);
    EXPECT_LT(overflows, 20);
  }
}

// A checkpoint of another precision has no scale to go on with; of float16, its own goes on.
TEST_F(LossScaleRunTest, ACheckpointOfAnotherPrecisionLeavesTheScaleToTheFlag) {
  const auto resumed = [&](const std::string& first, const std::string& scale) {
    const std::string folder = folder_.file(first), file = folder_.file("resumed.jsonl");
    std::vector<std::string> words = {
        "run", model_, "--loss", testing::kTinyLoss, "--steps", "2", "--checkpoint-dir", folder};
    words.insert(words.end(), {"--precision", first});
    EXPECT_EQ(run_trainrt(words).exit_code, 0);
    words[5] = "4";
    words.back() = "fp16";
    words.insert(words.end(), {"--resume", "--init-scale", scale, "--metrics", file});
    const ProgramResult result = run_trainrt(words);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.err.find("--init-scale 1024 has no effect") != std::string::npos,
              first == "fp16")
        << result.err;
    return metrics(file).at(0)["loss_scale"].get<double>();
  };
  EXPECT_EQ(resumed("fp32", "1024"), 1024);
  EXPECT_EQ(resumed("bf16", "1024"), 1024);
  EXPECT_EQ(resumed("fp16", "1024"), 65536);
}

}  // namespace
}  // namespace trainrt
