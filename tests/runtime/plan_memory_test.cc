// What `plan` says of memory is what a run of that plan allocates, to the byte, on every rank.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "graph/base/error.h"
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

void make_model(const std::vector<std::string>& words, const std::string& file) {
  std::vector<std::string> make = {"model"};
  make.insert(make.end(), words.begin(), words.end());
  make.insert(make.end(), {"-o", file});
  ASSERT_EQ(run_trainrt(make).exit_code, 0);
}

// Plans with `pins`, runs what is planned with `flags` alone, and compares; `planned_report`
// gets what the plan said.
void compare(const std::string& model,
             const TemporaryFolder& folder,
             const std::vector<std::string>& flags,
             const std::vector<std::string>& pins,
             Json* planned_report) {
  const std::string file = folder.file("plan.json"), metrics = folder.file("metrics.jsonl");
  std::vector<std::string> plan = {"plan", model, "--format", "json"}, run = {"run", model};
  plan.insert(plan.end(), flags.begin(), flags.end());
  plan.insert(plan.end(), pins.begin(), pins.end());
  const ProgramResult planned = run_trainrt(plan);
  ASSERT_EQ(planned.exit_code, 0) << planned.err << planned.out;
  const Json report = Json::parse(planned.out);
  EXPECT_EQ(report["memory_from"], "programs");
  write_text(file, report["plan"].dump());
  run.insert(run.end(), flags.begin(), flags.end());
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
  *planned_report = report;
}

class PlanMemoryTest : public ::testing::TestWithParam<MemoryCase> {};

TEST_P(PlanMemoryTest, EqualsTheRuns) {
  const MemoryCase& c = GetParam();
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx");
  make_model(c.model, model);
  Json report;
  compare(model, folder, c.flags, c.pins, &report);
}

const std::vector<std::string> kMlp = {"mlp", "--hidden", "50", "--layers", "2"};
const std::vector<std::string> kGpt = {
    "gpt2", "--layers", "4", "--hidden", "32", "--heads", "4", "--seq", "16", "--vocab", "101"};
const std::vector<std::string> kCnn = {"cnn"};
const std::vector<std::string> kResnet = {"resnet", "--layers", "18", "--image", "32"};
const std::vector<std::string> kT5 = {
    "t5", "--layers", "2", "--hidden", "32", "--heads", "4", "--seq", "8", "--vocab", "64"};
// The sequence alone is no multiple of four.
const std::vector<std::string> kLlama = {"llama",
                                         "--layers",
                                         "2",
                                         "--hidden",
                                         "32",
                                         "--heads",
                                         "4",
                                         "--kv-heads",
                                         "4",
                                         "--ffn",
                                         "64",
                                         "--vocab",
                                         "64",
                                         "--seq",
                                         "10"};
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
        MemoryCase{"CnnTensor", kCnn, {"--batch-size", "4", "--devices", "cpu:2"}, {"--tp", "2"}},
        MemoryCase{
            "CnnTensorUneven", kCnn, {"--batch-size", "4", "--devices", "cpu:3"}, {"--tp", "3"}},
        MemoryCase{"UnetTensorUneven",
                   kUnet,
                   {"--batch-size", "2", "--devices", "cpu:6"},
                   {"--tp", "3", "--pp", "2"}},
        MemoryCase{
            "MlpTensorUneven", kMlp, {"--batch-size", "7", "--devices", "cpu:3"}, {"--tp", "3"}},
        MemoryCase{"GptTensorUneven",
                   kGpt,
                   {"--batch-size", "6", "--devices", "cpu:6"},
                   {"--tp", "3", "--dp", "2"}},
        MemoryCase{"GptSequenceUneven",
                   kGpt,
                   {"--batch-size", "2", "--devices", "cpu:3"},
                   {"--tp", "3", "--sequence-parallel"}},
        MemoryCase{"LlamaSequenceUneven",
                   kLlama,
                   {"--batch-size", "2", "--devices", "cpu:4"},
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

TEST(SizesOfDataRanksTest, EqualsTheRuns) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx"), given = folder.file("given.json");
  make_model(kGpt, model);
  const auto share = [](int data_rank, int samples, int size) {
    return Json{{"data_rank", data_rank}, {"num_samples", samples}, {"micro_batch_size", size}};
  };
  const Json shares = {share(0, 8, 4), share(1, 5, 2)};
  for (const auto& [degrees, zero] : {std::pair{1, 0}, {1, 2}, {2, 1}}) {
    write_text(given, Json{{"shares", shares}, {"zero_stage", zero}}.dump());
    Json report;
    compare(model,
            folder,
            {"--batch-size", "13", "--devices", concat("cpu:", 2 * degrees)},
            {"--plan", given, "--pp", concat(degrees)},
            &report);
    EXPECT_EQ(report["plan"]["shares"][0]["micro_batch_size"], 4);
    EXPECT_EQ(report["plan"]["shares"][1]["micro_batch_size"], 2);
    EXPECT_EQ(report["plan"]["shares"][1]["num_micro_batches"], 3);
  }
}

// Memory between what all and none of the blocks need that run again: some do, and they fit.
// A run without a plan file finds the plan that `plan` prints, in every precision.
TEST(OwnPlanTest, IsThatOfThePlanCommand) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx"), metrics = folder.file("metrics.jsonl");
  make_model(kGpt, model);
  for (const std::string precision : {"fp32", "bf16", "fp16"}) {
    for (const char* degree : {"--pp", "--tp"}) {
      SCOPED_TRACE(precision + " " + degree);
      const std::vector<std::string> flags = {"--batch-size",
                                              "8",
                                              "--micro-batch-size",
                                              "2",
                                              "--devices",
                                              "cpu:4",
                                              degree,
                                              "4",
                                              "--precision",
                                              precision};
      std::vector<std::string> plan = {"plan", model, "--format", "json"};
      std::vector<std::string> run = {"run", model, "--steps", "1", "--metrics", metrics};
      plan.insert(plan.end(), flags.begin(), flags.end());
      run.insert(run.end(), flags.begin(), flags.end());
      const ProgramResult planned = run_trainrt(plan), ran = run_trainrt(run);
      ASSERT_EQ(planned.exit_code, 0) << planned.err;
      ASSERT_EQ(ran.exit_code, 0) << ran.err;
      std::vector<int64_t> expected;
      const Json report = Json::parse(planned.out);
      for (const Json& rank : report["ranks"]) {
        expected.push_back(rank["peak_bytes"]);
      }
      EXPECT_EQ(Json::parse(file_text(metrics))["peak_bytes"].get<std::vector<int64_t>>(),
                expected);
    }
  }
}

TEST(RecomputeOfSomeBlocksTest, EqualsTheRuns) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx"), cluster = folder.file("cluster.yaml");
  make_model(kGpt, model);
  const std::vector<std::string> pins = {"--batch-size", "16", "--micro-batch-size", "8"};
  const auto peak = [&](const char* recompute) {
    std::vector<std::string> plan = {"plan", model, "--format", "json", "--recompute", recompute};
    plan.insert(plan.end(), pins.begin(), pins.end());
    plan.insert(plan.end(), {"--devices", "cpu"});
    return Json::parse(run_trainrt(plan).out)["predicted"]["peak_bytes_max"].get<int64_t>();
  };
  const int64_t limit = (peak("none") + peak("full")) / 2;
  write_text(cluster, concat("hosts: [{devices: [{count: 1, type: cpu, memory: ", limit, "}]}]\n"));
  std::vector<std::string> flags = pins;
  flags.insert(flags.end(), {"--cluster", cluster});
  Json report;
  compare(model, folder, flags, {}, &report);
  EXPECT_LE(report["predicted"]["peak_bytes_max"], limit);
  const Json recompute = report["plan"]["stages"][0]["recompute"];
  EXPECT_FALSE(recompute["runs"].empty()) << recompute;
}

// The estimate of gathered weights in a single stage is twice what the program needs.
TEST(PlanLimitTest, WhatFitsUnderZero3AloneIsFound) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx");
  make_model({"llama-8b"}, model);
  const ProgramResult result = run_trainrt({"plan",
                                            model,
                                            "--cluster",
                                            "rtx-4090:8",
                                            "--batch-size",
                                            "8",
                                            "--pp",
                                            "1",
                                            "--what-if",
                                            "off",
                                            "--format",
                                            "json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const Json report = Json::parse(result.out);
  EXPECT_EQ(report["plan"]["zero_stage"], 3);
  EXPECT_LE(report["search"]["lower_bound_seconds"].get<double>(),
            report["predicted"]["step_seconds"].get<double>());
}

}  // namespace
}  // namespace trainrt::testing
