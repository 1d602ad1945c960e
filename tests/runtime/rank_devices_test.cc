// Every rank runs on the device that the plan names for it, and is limited by it.
#include "runtime/rank_devices.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "graph/base/error.h"
#include "parallel/cluster_file.h"
#include "planner/candidates.h"
#include "runtime/plan_choice.h"
#include "tests/support/run_program.h"

namespace trainrt {
namespace {

using ::testing::ElementsAre;
using testing::file_text;
using ::testing::HasSubstr;
using testing::ProgramResult;
using testing::run_trainrt;
using testing::TemporaryFolder;
using testing::write_text;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

class RankDevicesTest : public ::testing::Test {
 protected:
  Options options(const std::string& cluster) const {
    write_text(cluster_, cluster);
    return parse_options("run",
                         kDataOptions | kTrainingOptions | kPlanOptions | kRunOptions,
                         {model_, "--cluster", cluster_, "--threads", "1"});
  }

  TemporaryFolder folder_;
  std::string model_ = folder_.file("m.onnx"), cluster_ = folder_.file("cluster.yaml");
};

constexpr const char* kSmallFirst =
    "hosts:\n  - {count: 1, devices: [{count: 1, type: cpu, memory: 700KiB, speed: 0.5}, "
    "{count: 2, type: cpu, memory: 4MiB}]}\n";

Plan plan_on(const std::vector<const char*>& devices) {
  Plan plan = single_device_plan(8, 1, 1);
  plan.data_parallel = static_cast<int>(devices.size());
  plan.devices.clear();
  for (const char* device : devices) {
    plan.devices.push_back({static_cast<int>(plan.devices.size()), "host0", device});
  }
  return plan;
}

TEST_F(RankDevicesTest, TheSmallDeviceMayComeFirst) {
  testing::write_model("gpt2 --layers 3 --hidden 28 --heads 4 --seq 13 --vocab 103", model_);
  write_text(cluster_, kSmallFirst);
  const Words job = {model_, "--cluster", cluster_, "--batch-size", "13", "--threads", "1"};
  const ProgramResult planned =
      run_trainrt(Words{"plan"} + job + Words{"--dp", "3", "--format", "json"});
  ASSERT_EQ(planned.exit_code, 0) << planned.err;
  const Json report = Json::parse(planned.out);
  ASSERT_EQ(report["plan"]["devices"][2]["device"], "cpu:0");
  const std::string file = folder_.file("plan.json"), metrics = folder_.file("m.jsonl");
  write_text(file, report["plan"].dump());
  for (const Words& how : {Words{"--dp", "3"}, {"--plan", file}, {"--dp", "3", "--nproc", "3"}}) {
    SCOPED_TRACE(::testing::PrintToString(how));
    const ProgramResult ran =
        run_trainrt(Words{"run"} + job + how + Words{"--steps", "1", "--metrics", metrics});
    ASSERT_EQ(ran.exit_code, 0) << ran.err;
    const Json peaks = Json::parse(file_text(metrics))["peak_bytes"];
    for (size_t rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(peaks[rank], report["ranks"][rank]["peak_bytes"]) << "rank " << rank;
    }
    EXPECT_LE(peaks[2], 700 << 10);
  }
}

TEST_F(RankDevicesTest, LimitsAndSpeedGoWithTheDevice) {
  const Options run = options(kSmallFirst);
  const std::vector<DeviceOptions> own =
      devices_of_ranks(run, plan_on({"cpu:1", "cpu:2", "cpu:0"}), run_devices(run, {}), {});
  EXPECT_THAT(std::vector<double>({own[0].speed, own[1].speed, own[2].speed}),
              ElementsAre(1, 1, 0.5));
  EXPECT_GT(own[0].memory_limit, own[2].memory_limit);
  EXPECT_THAT(data_rank_weights(run, plan_on({"cpu:1", "cpu:2", "cpu:0"}), own),
              ElementsAre(1, 1, 0.5));
  EXPECT_EQ(make_device(own[2])->name(), "cpu:0");
}

// Without a cluster the plan's own names are counted, two before ten.
TEST_F(RankDevicesTest, DevicesAndClusterThatDisagreeAreRefused) {
  testing::write_model("mlp --hidden 8", model_);
  for (const char* command : {"run", "eval"}) {
    const ProgramResult result =
        run_trainrt({command, model_, "--cluster", "cpu:1", "--devices", "cpu:2", "--steps", "1"});
    EXPECT_EQ(result.exit_code, 2) << result.out;
    EXPECT_THAT(result.err, HasSubstr("--devices cpu:2 and the 1 devices of --cluster cpu:1"));
  }
}

// A plan that nobody searched for names the cluster's devices, too.
TEST_F(RankDevicesTest, EvaluationTakesACluster) {
  testing::write_model("mlp --hidden 8", model_);
  for (const char* count : {"1", "2"}) {
    write_text(cluster_,
               concat("hosts: [{count: 1, devices: [{count: ", count, ", type: cpu}]}]\n"));
    const ProgramResult result =
        run_trainrt({"eval", model_, "--cluster", cluster_, "--steps", "1", "--batch-size", "4"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

TEST_F(RankDevicesTest, NamesOfAPlanAloneAreAnOrder) {
  const Options run;
  std::vector<DeviceOptions> gpus(3);
  for (int i = 0; i < 3; ++i) {
    gpus[static_cast<size_t>(i)].cuda_index = 4 + i;
  }
  const auto own = devices_of_ranks(run, plan_on({"cuda:10", "cuda:0", "cuda:2"}), gpus, {});
  EXPECT_EQ(own[0].cuda_index, 6);
  EXPECT_EQ(own[1].cuda_index, 4);
  EXPECT_EQ(own[2].cuda_index, 5);
}

TEST_F(RankDevicesTest, ARankStaysWhereItsProcessIs) {
  const Options run = options(kSmallFirst);
  const Processes processes = {{"a", "b", "b"}, 1};
  EXPECT_EQ(device_place(run, processes), "b");
  const std::vector<DeviceOptions> devices = run_devices(run, processes);
  const auto own =
      devices_of_ranks(run, plan_on({"cpu:0", "cpu:2", "cpu:1"}), devices, processes.hosts);
  EXPECT_EQ(own[1].index, 2);
  try {
    devices_of_ranks(run, plan_on({"cpu:1", "cpu:2", "cpu:0"}), devices, processes.hosts);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 0 run on host0/cpu:1"));
    EXPECT_THAT(error.what(), HasSubstr("started as rank 1"));
  }
}

// Fast devices first would be an order; of several hosts only where each has its own.
TEST_F(RankDevicesTest, TheSearchKeepsRanksWhereTheirProcessesAre) {
  PlanRequest request;
  request.topology = parse_cluster(kSmallFirst, "test");
  const Degrees degrees{3, 1, 1};
  EXPECT_THAT(candidate_device_orders(request, degrees),
              ElementsAre(ElementsAre(), ElementsAre(1, 2, 0)));
  request.places = {"a", "a", "a"};
  EXPECT_EQ(candidate_device_orders(request, degrees).size(), 2u);
  request.places = {"a", "b", "b"};
  EXPECT_THAT(candidate_device_orders(request, degrees), ElementsAre(ElementsAre()));
}

TEST_F(RankDevicesTest, DevicesThatTheClusterLacksAreNamed) {
  const Options run = options(kSmallFirst);
  try {
    devices_of_ranks(run, plan_on({"cpu:0", "cpu:1", "cpu:3"}), run_devices(run, {}), {});
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("host0/cpu:3"));
  }
}

// A search that leaves devices idle: their ranks are not there.
TEST_F(RankDevicesTest, APlanMayLeaveDevicesIdle) {
  testing::write_model("mlp --hidden 8 --layers 1", model_);
  write_text(cluster_, kSmallFirst);
  const ProgramResult ran = run_trainrt({"run",
                                         model_,
                                         "--cluster",
                                         cluster_,
                                         "--batch-size",
                                         "1",
                                         "--pp",
                                         "1",
                                         "--tp",
                                         "1",
                                         "--steps",
                                         "1"});
  EXPECT_EQ(ran.exit_code, 0) << ran.err;
}

}  // namespace
}  // namespace trainrt
