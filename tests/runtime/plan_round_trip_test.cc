// A plan fed back is reported as the search that found it reported it: one number per plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "graph/base/error.h"
#include "tests/support/run_program.h"

namespace trainrt::testing {
namespace {

using Json = nlohmann::json;

constexpr const char* kCpus = R"(
hosts:
  - {count: 1, devices: [{count: 2, type: cpu, memory: 4GiB},
                         {count: 2, type: cpu, memory: 2GiB, speed: 0.5}]}
)";
constexpr const char* kGpus = R"(
hosts:
  - {count: 1, devices: [{count: 2, type: a100-80gb-sxm}], intra: nvlink3}
  - {count: 1, devices: [{count: 2, type: v100-sxm2-16gb}], intra: nvlink2}
)";
constexpr const char* kGpt =
    "gpt2 --layers 4 --hidden 64 --heads 4 --seq 32 --vocab 512";  // one matrix for both ends
constexpr const char* kWideGpt = "gpt2 --layers 4 --hidden 512 --heads 8 --seq 128 --vocab 8192";

struct RoundTrip {
  const char* name;
  const char* model;
  const char* cluster;  // a preset, or a file's text
  std::vector<std::string> flags;
};

void PrintTo(const RoundTrip& row, std::ostream* out) {
  *out << row.name;
}

class PlanRoundTripTest : public ::testing::TestWithParam<RoundTrip> {};

TEST_P(PlanRoundTripTest, KeepsTimeAndMemory) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx"), cluster = folder.file("c.yaml");
  write_model(GetParam().model, model);
  const bool is_text = std::string(GetParam().cluster).find('{') != std::string::npos;
  write_text(cluster, GetParam().cluster);
  const auto report = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> words = {"plan", model, "--format", "json", "--what-if", "off"};
    words.insert(words.end(), {"--cluster", is_text ? cluster : GetParam().cluster});
    words.insert(words.end(), flags.begin(), flags.end());
    const ProgramResult result = run_trainrt(words);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.exit_code == 0 ? Json::parse(result.out) : Json();
  };
  const Json found = report(GetParam().flags);
  ASSERT_FALSE(found.is_null());
  write_text(folder.file("p.json"), found["plan"].dump());
  const Json again = report({"--plan", folder.file("p.json")});
  ASSERT_FALSE(again.is_null());
  EXPECT_EQ(again["plan"], found["plan"]);
  EXPECT_EQ(again["ranks"], found["ranks"]);
  EXPECT_EQ(again["predicted"], found["predicted"]);
  int64_t most = 0;
  for (const Json& rank : found["ranks"]) {
    most = std::max<int64_t>(most, rank["peak_bytes"]);
  }
  EXPECT_EQ(found["predicted"]["peak_bytes_max"], most);
  double sum = 0;
  for (const auto& [part, seconds] : found["predicted"]["breakdown_seconds"].items()) {
    sum += seconds.get<double>();
  }
  const double step = found["predicted"]["step_seconds"];
  EXPECT_NEAR(sum, step, 1e-3 * step);
}

// The search goes by an estimate of memory, which lies above what these models' programs need: by
// 2.6 %, and by a third.
class PlanLimitTest : public ::testing::TestWithParam<const char*> {};

TEST_P(PlanLimitTest, ALimitOfThePeakIsEnoughAndOneByteLessIsNot) {
  const TemporaryFolder folder;
  const std::string model = folder.file("m.onnx"), cluster = folder.file("c.yaml");
  write_model(GetParam(), model);
  const auto with_memory = [&](int64_t bytes) {
    write_text(cluster, concat("hosts: [{devices: [{count: 1, type: cpu, memory: ", bytes, "}]}]"));
    return run_trainrt({"plan",
                        model,
                        "--format",
                        "json",
                        "--cluster",
                        cluster,
                        "--batch-size",
                        "16",
                        "--micro-batch-size",
                        "16",
                        "--recompute",
                        "none"});
  };
  const ProgramResult free = with_memory(int64_t{1} << 30);
  ASSERT_EQ(free.exit_code, 0) << free.err;
  const int64_t peak = Json::parse(free.out)["predicted"]["peak_bytes_max"];
  const ProgramResult tight = with_memory(peak);
  EXPECT_EQ(tight.exit_code, 0) << tight.err;
  EXPECT_EQ(Json::parse(tight.out)["predicted"]["peak_bytes_max"], peak);
  const ProgramResult over = with_memory(peak - 1);
  EXPECT_EQ(over.exit_code, 4) << over.out;
  const Json report = Json::parse(over.out);
  EXPECT_EQ(report["missing_bytes"], 1);
  EXPECT_TRUE(report["search"]["gap"].is_null());
}

INSTANTIATE_TEST_SUITE_P(
    Models,
    PlanLimitTest,
    ::testing::Values("gpt2 --layers 4 --hidden 32 --heads 4 --vocab 101 --seq 16",
                      "gpt2 --layers 2 --hidden 32 --heads 2 --vocab 3001 --seq 16"),
    [](const auto& tested) { return tested.index == 0 ? "Narrow" : "LargeVocabulary"; });

INSTANTIATE_TEST_SUITE_P(
    Plans,
    PlanRoundTripTest,
    ::testing::Values(
        RoundTrip{"ShortLastOfOneRank", "mlp", "cpu:1", {"--micro-batch-size", "20"}},
        RoundTrip{"ShortLastOfOneOfFour",
                  "resnet18",
                  "dgx-a100",
                  {"--batch-size", "33", "--micro-batch-size", "4", "--dp", "8"}},
        RoundTrip{"ShortLastInAPipeline",
                  kGpt,
                  "dgx-a100",
                  {"--batch-size", "33", "--micro-batch-size", "2", "--pp", "4"}},
        RoundTrip{"ShortLastInAFreeSearch", kWideGpt, "rtx-4090:4", {"--batch-size", "23"}},
        RoundTrip{"TiedMatrixCutAtOneEnd",
                  kWideGpt,
                  "dgx-a100",
                  {"--batch-size", "16", "--tp", "4", "--pp", "2"}},
        RoundTrip{"TiedMatrixOfOneStage", kWideGpt, kGpus, {"--batch-size", "16", "--tp", "2"}},
        RoundTrip{"MixedGpus", "resnet18", kGpus, {"--batch-size", "50"}},
        RoundTrip{"MixedGpusInAPipeline", kWideGpt, kGpus, {"--batch-size", "13", "--pp", "2"}},
        RoundTrip{"Cpus", kGpt, "cpu:4", {"--batch-size", "13", "--micro-batch-size", "2"}},
        RoundTrip{"CpusByTensor", kGpt, "cpu:4", {"--batch-size", "7", "--tp", "2"}},
        RoundTrip{"MixedCpus", "lenet", kCpus, {"--batch-size", "50"}},
        RoundTrip{"MixedCpusInAPipeline", kGpt, kCpus, {"--batch-size", "13", "--pp", "2"}},
        RoundTrip{"ExactSums", kGpt, "cpu:3", {"--batch-size", "13", "--reduction", "exact"}},
        RoundTrip{"FewerSamplesThanFit",
                  kGpt,
                  "cpu:2",
                  {"--batch-size", "7", "--dp", "2", "--micro-batch-size", "5"}}),
    [](const auto& row) { return std::string(row.param.name); });

}  // namespace
}  // namespace trainrt::testing
