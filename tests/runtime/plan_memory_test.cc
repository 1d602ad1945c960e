// What `plan` says of memory is what a run of that plan allocates, to the byte, on every rank.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/support/run_program.h"

namespace trainrt::testing {
namespace {

using Json = nlohmann::json;

struct MemoryCase {
  const char* name;
  std::vector<std::string> model;  // of `trainrt model`
  std::vector<std::string> flags;  // of both commands
  std::vector<std::string> pins;   // of `plan`
};

class PlanMemoryTest : public ::testing::TestWithParam<MemoryCase> {};

TEST_P(PlanMemoryTest, EqualsTheRuns) {
  const MemoryCase& c = GetParam();
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx"), file = folder.file("plan.json"),
                    metrics = folder.file("metrics.jsonl");
  std::vector<std::string> make = {"model"};
  make.insert(make.end(), c.model.begin(), c.model.end());
  make.insert(make.end(), {"-o", model});
  ASSERT_EQ(run_trainrt(make).exit_code, 0);
  std::vector<std::string> plan = {"plan", model, "--format", "json"}, run = {"run", model};
  plan.insert(plan.end(), c.flags.begin(), c.flags.end());
  plan.insert(plan.end(), c.pins.begin(), c.pins.end());
  const ProgramResult planned = run_trainrt(plan);
  ASSERT_EQ(planned.exit_code, 0) << planned.err << planned.out;
  const Json report = Json::parse(planned.out);
  EXPECT_EQ(report["memory_from"], "programs");
  write_text(file, report["plan"].dump());
  run.insert(run.end(), c.flags.begin(), c.flags.end());
  run.insert(run.end(), {"--plan", file, "--steps", "1", "--metrics", metrics});
  const ProgramResult ran = run_trainrt(run);
  ASSERT_EQ(ran.exit_code, 0) << ran.err;
  const std::string lines = file_text(metrics);
  const Json step = Json::parse(lines.substr(0, lines.find('\n')));
  ASSERT_EQ(step["peak_bytes"].size(), report["ranks"].size());
  for (size_t rank = 0; rank < report["ranks"].size(); ++rank) {
    EXPECT_EQ(report["ranks"][rank]["peak_bytes"], step["peak_bytes"][rank]) << "rank " << rank;
    int64_t sum = 0;
    for (const auto& [part, bytes] : report["ranks"][rank]["breakdown"].items()) {
      sum += bytes.get<int64_t>();
    }
    EXPECT_EQ(sum, step["peak_bytes"][rank].get<int64_t>());
  }
}

const std::vector<std::string> kMlp = {"mlp", "--hidden", "50", "--layers", "2"};
const std::vector<std::string> kGpt = {
    "gpt2", "--layers", "4", "--hidden", "32", "--heads", "4", "--seq", "16", "--vocab", "101"};
const std::vector<std::string> kCnn = {"cnn"};
const std::vector<std::string> kResnet = {"resnet", "--layers", "18", "--image", "32"};
const std::vector<std::string> kT5 = {
    "t5", "--layers", "2", "--hidden", "32", "--heads", "4", "--seq", "8", "--vocab", "64"};
const std::vector<std::string> kUnet = {"unet", "--image", "32"};

INSTANTIATE_TEST_SUITE_P(
    Layouts,
    PlanMemoryTest,
    ::testing::Values(
        MemoryCase{"MlpAlone", kMlp, {"--batch-size", "8"}, {}},
        MemoryCase{"CnnMicroBatches", kCnn, {"--batch-size", "8"}, {"--micro-batch-size", "3"}},
        MemoryCase{"GptRecompute", kGpt, {"--batch-size", "4"}, {"--recompute", "full"}},
        MemoryCase{"UnetAlone", kUnet, {"--batch-size", "2"}, {}},
        MemoryCase{"ResnetData",
                   kResnet,
                   {"--batch-size", "5", "--devices", "cpu:2"},
                   {"--dp", "2", "--zero", "0"}},
        MemoryCase{"MlpZeroUneven",
                   kMlp,
                   {"--batch-size", "7", "--devices", "cpu:3"},
                   {"--dp", "3", "--zero", "2", "--micro-batch-size", "1"}},
        MemoryCase{"GptZero3",
                   kGpt,
                   {"--batch-size", "6", "--devices", "cpu:3"},
                   {"--dp", "3", "--zero", "3"}},
        MemoryCase{"GptTensor",
                   kGpt,
                   {"--batch-size", "4", "--devices", "cpu:4"},
                   {"--tp", "4", "--sequence-parallel"}},
        MemoryCase{"T5Pipeline",
                   kT5,
                   {"--batch-size", "4", "--devices", "cpu:2"},
                   {"--pp", "2", "--micro-batch-size", "1", "--recompute", "selective"}},
        MemoryCase{"GptInterleaved",
                   kGpt,
                   {"--batch-size", "8", "--devices", "cpu:2"},
                   {"--pp", "2", "--virtual-stages", "2", "--micro-batch-size", "1"}},
        MemoryCase{
            "GptAll",
            kGpt,
            {"--batch-size", "6", "--devices", "cpu:8"},
            {"--dp", "2", "--tp", "2", "--pp", "2", "--zero", "1", "--micro-batch-size", "1"}},
        MemoryCase{"MlpExact",
                   kMlp,
                   {"--batch-size", "13", "--devices", "cpu:3"},
                   {"--dp", "3", "--reduction", "exact", "--logical-shards", "5"}},
        MemoryCase{"GptExactZero",
                   kGpt,
                   {"--batch-size", "8", "--devices", "cpu:2"},
                   {"--dp", "2", "--zero", "2", "--reduction", "exact"}},
        MemoryCase{"ResnetSynchronised",
                   kResnet,
                   {"--batch-size", "5", "--devices", "cpu:2"},
                   {"--dp", "2", "--batch-norm", "sync"}},
        MemoryCase{"GptHalfPrecision",
                   kGpt,
                   {"--batch-size", "4", "--devices", "cpu:2", "--precision", "bf16"},
                   {"--dp", "2"}}),
    [](const auto& made) { return made.param.name; });

}  // namespace
}  // namespace trainrt::testing
