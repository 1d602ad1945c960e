// Options that contradict each other or would destroy something, told before any work is done.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/run_program.h"
#include "tests/support/tiny_model.h"

namespace trainrt::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A tiny model whose first weights lie in a file that is not called after it.
std::string model_with_weights_in(const std::string& file) {
  return "<ir_version: 8, opset_import: [\"\" : 17]>\n"
         "tiny (float[N, 4] x) => (float[N, 3] y)\n"
         "<float[4, 3] w = [\"location\": \"" +
         file + "\"]>\n{ y = MatMul(x, w) }\n";
}

struct Replacement {
  const char* name;
  std::vector<std::string> flags;  // "%" stands for the folder
  const char* what;                // would be replaced
};

class ReplacementTest : public ::testing::TestWithParam<Replacement> {};

TEST_P(ReplacementTest, OutputsReplaceNoInput) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx"), weights = folder.file("numbers.bin"),
                    text = folder.file("t.txt");
  write_text(model, model_with_weights_in("numbers.bin"));
  write_text(weights, std::string(48, '\0'));
  write_text(text, "loss: mse\n");
  std::vector<std::string> words = {GetParam().flags[0], model};
  for (size_t i = 1; i < GetParam().flags.size(); ++i) {
    std::string word = GetParam().flags[i];
    const size_t at = word.find('%');
    words.push_back(at == std::string::npos ? word : word.replace(at, 1, folder.path()));
  }
  const std::string before = file_text(model);
  const ProgramResult result = run_trainrt(words);
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_THAT(result.err, AllOf(HasSubstr("would replace"), HasSubstr(GetParam().what)));
  EXPECT_EQ(file_text(model), before);
  EXPECT_EQ(file_text(weights), std::string(48, '\0'));
  EXPECT_EQ(file_text(text), "loss: mse\n");
}

INSTANTIATE_TEST_SUITE_P(
    Commands,
    ReplacementTest,
    ::testing::Values(
        Replacement{"Model", {"run", "--loss", "mse", "--export", "%/m.onnx"}, "the model"},
        Replacement{
            "ModelByAnotherName", {"run", "--loss", "mse", "--trace", "%/./m.onnx"}, "the model"},
        Replacement{"Weights",
                    {"run", "--loss", "mse", "--export", "%/numbers.bin"},
                    "the model's weights"},
        Replacement{"WeightsByPlan",
                    {"plan", "--loss", "mse", "--annotate", "%/numbers.bin"},
                    "the model's weights"},
        Replacement{"WeightsByInspect", {"inspect", "-o", "%/numbers.bin"}, "the model's weights"},
        Replacement{"Config", {"run", "--config", "%/t.txt", "--metrics", "%/t.txt"}, "--config"},
        Replacement{"AnotherOutput",
                    {"run", "--loss", "mse", "--metrics", "%/a", "--trace", "%/a"},
                    "--metrics"}),
    [](const auto& row) { return std::string(row.param.name); });

// Neither refused nor dropped without a word, and alike in both commands.
TEST(IdlePinsTest, WhatChangesNothingInThePlanIsSaid) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx");
  write_text(model, tiny_model());
  struct Row {
    std::vector<std::string> flags;
    const char* says;
  };
  for (const Row& row : {Row{{"--zero", "2"}, "--zero 2 changes nothing"},
                         Row{{"--schedule", "zb-h1"}, "--schedule zb-h1 changes nothing"},
                         Row{{"--micro-batch-size", "64"}, "micro-batches have 32 samples"},
                         Row{{"--devices",
                              "cpu:2",
                              "--pp",
                              "2",
                              "--schedule",
                              "interleaved",
                              "--virtual-stages",
                              "1"},
                             "interleaved is 1f1b here"}}) {
    for (const char* command : {"plan", "run"}) {
      std::vector<std::string> words = {command, model, "--loss", "mse", "--steps", "1"};
      words.insert(words.end(), row.flags.begin(), row.flags.end());
      const ProgramResult result = run_trainrt(words);
      EXPECT_EQ(result.exit_code, 0) << result.err;
      EXPECT_THAT(result.err, AllOf(HasSubstr("warning: "), HasSubstr(row.says))) << command;
    }
  }
}

TEST(IdlePinsTest, SequenceParallelismOfOneRankIsRefusedByBothCommands) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx");
  write_text(model, tiny_model());
  for (const char* command : {"plan", "run"}) {
    const ProgramResult result =
        run_trainrt({command, model, "--loss", "mse", "--sequence-parallel"});
    EXPECT_NE(result.exit_code, 0) << command;
    EXPECT_THAT(result.err, HasSubstr("--sequence-parallel needs a tensor group"));
  }
}

TEST(ModelSizesTest, ASizeThatTheFamilyLacksIsRefused) {
  const TemporaryFolder folder;
  const auto message = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> words = {"model"};
    words.insert(words.end(), flags.begin(), flags.end());
    words.insert(words.end(), {"-o", folder.file("m.onnx")});
    const ProgramResult result = run_trainrt(words);
    EXPECT_EQ(result.exit_code, 2);
    return result.err;
  };
  EXPECT_THAT(message({"mlp", "--heads", "3"}),
              AllOf(HasSubstr("mlp has no --heads"),
                    HasSubstr("--layers --hidden --classes --image --channels --dropout")));
  EXPECT_THAT(message({"gpt2-124m", "--kv-heads", "3"}), HasSubstr("gpt2 has no --kv-heads"));
  EXPECT_THAT(message({"resnet50", "--dropout", "0.1"}), HasSubstr("resnet has no --dropout"));
}

}  // namespace
}  // namespace trainrt::testing
