// What a run exports is the model it trained: evaluating the file gives the trained loss, also for
// a model with constants (Dropout's ratio, masks) and BatchNorm statistics, and from several ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using testing::ProgramResult;
using testing::run_trainrt;
using testing::write_model;

double loss_of(const std::string& model) {
  const ProgramResult result =
      run_trainrt({"eval", model, "--steps", "4", "--batch-size", "32", "--format", "json"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return nlohmann::json::parse(result.out)["loss"].get<double>();
}

TEST(ExportCommandTest, TheExportedModelIsTheTrainedOne) {
  testing::TemporaryFolder folder;
  const std::string model = folder.file("cnn.onnx"), trained = folder.file("trained.onnx");
  write_model("cnn --hidden 4 --ffn 16", model);
  for (const std::string devices : {"cpu", "cpu:2"}) {
    const ProgramResult run = run_trainrt({"run",
                                           model,
                                           "--steps",
                                           "60",
                                           "--batch-size",
                                           "32",
                                           "--devices",
                                           devices,
                                           "--export",
                                           trained});
    ASSERT_EQ(run.exit_code, 0) << devices << run.err;
    EXPECT_LT(loss_of(trained), 0.8 * loss_of(model)) << devices;
  }
}

// The run computes in float32 what the file stores in 16 bits.
TEST(ExportCommandTest, WeightsBeyondTheFilesTypeAreNamed) {
  testing::TemporaryFolder folder;
  const std::string model = folder.file("m.onnx"), trained = folder.file("trained.onnx");
  testing::write_text(model,
                      "<ir_version: 8, opset_import: [\"\" : 17]>\n"
                      "half (float16[N, 2] x) => (float16[N, 2] y)\n"
                      "<float16[2, 2] w = {0, 0, 0, 0}>\n{\n  y = MatMul(x, w)\n}\n");
  for (const bool beyond : {false, true}) {
    const ProgramResult run = run_trainrt({"run",
                                           model,
                                           "--steps",
                                           "1",
                                           "--optimizer",
                                           "sgd",
                                           "--lr",
                                           beyond ? "1e8" : "1",
                                           "--export",
                                           trained});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(run.err.find("holds infinity where the model trained, in 'w'") != std::string::npos,
              beyond)
        << run.err;
  }
}

// An evaluated text lacks some of the characters that the model was trained on.
TEST(ExportCommandTest, AnExportedModelKeepsItsAlphabet) {
  testing::TemporaryFolder folder;
  const std::string model = folder.file("gpt.onnx"), trained = folder.file("trained.onnx");
  const std::string text = folder.file("t.txt"), other = folder.file("other.txt");
  const std::string tokens = folder.file("other.bin");
  write_model("gpt2 --layers 1 --hidden 16 --heads 2 --vocab 8 --seq 4", model);
  std::string written, bytes;
  for (int i = 0; i < 40; ++i) {
    written += "abcd";
    bytes += std::string(i % 2 == 0 ? "\x01\x00" : "\x03\x00", 2);
  }
  testing::write_text(text, written);
  testing::write_text(tokens, bytes);
  std::string bd;
  for (int i = 0; i < 40; ++i) {
    bd += i % 2 == 0 ? 'b' : 'd';
  }
  testing::write_text(other, bd);
  const auto run = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"run", model, "--checkpoint-dir", folder.file("ck")});
    return run_trainrt(more);
  };
  const ProgramResult first =
      run({"--data", "text:" + text, "--epochs", "2", "--batch-size", "8", "--export", trained});
  ASSERT_EQ(first.exit_code, 0) << first.err;
  const auto eval = [&](const std::string& data) {
    return run_trainrt({"eval", trained, "--data", data});
  };
  const ProgramResult of_text = eval("text:" + other);
  EXPECT_EQ(of_text.exit_code, 0) << of_text.err;
  EXPECT_EQ(of_text.out, eval("tokens:" + tokens).out);

  testing::write_text(other, bd + "e");
  const ProgramResult unknown = eval("text:" + other);
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_THAT(unknown.err, ::testing::HasSubstr("has 'e' (code point 101) as character 40"));
  const ProgramResult resumed = run({"--data", "text:" + other, "--epochs", "3", "--resume"});
  EXPECT_EQ(resumed.exit_code, 2);
  EXPECT_THAT(resumed.err, ::testing::HasSubstr("numbers the characters"));
}

}  // namespace
}  // namespace trainrt
