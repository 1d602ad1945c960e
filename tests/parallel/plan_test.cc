#include "parallel/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "graph/base/error.h"
#include "parallel/micro_batches.h"

namespace trainrt {
namespace {

std::vector<int64_t> samples(const std::vector<DataShare>& shares) {
  std::vector<int64_t> result;
  for (const DataShare& share : shares) {
    result.push_back(share.num_samples);
  }
  return result;
}

using testing::ElementsAre;
using testing::HasSubstr;

TEST(PlanTest, SharesRoundByLargestRemainderTiesToTheLaterRank) {
  EXPECT_THAT(samples(make_shares(10, 3, 0, {})), ElementsAre(3, 3, 4));
  EXPECT_THAT(samples(make_shares(8, 3, 0, {2, 3, 3})), ElementsAre(2, 3, 3));
  EXPECT_THAT(samples(make_shares(32, 2, 0, {1, 3})), ElementsAre(8, 24));
  EXPECT_THAT(samples(make_shares(2, 3, 0, {})), ElementsAre(0, 1, 1));
  EXPECT_THAT(samples(make_shares(9, 3, 0, {1, 0, 1})), ElementsAre(4, 0, 5));
}

TEST(PlanTest, WithAMicroBatchSizeSharesAreWholeMicroBatchesAndTheLastIsShort) {
  // 10 samples in micro-batches of 4 are 3 micro-batches, the last of 2.
  const std::vector<DataShare> shares = make_shares(10, 2, 4, {});
  EXPECT_THAT(samples(shares), ElementsAre(4, 6));
  EXPECT_EQ(shares[0].num_micro_batches, 1);
  EXPECT_EQ(shares[1].num_micro_batches, 2);
  EXPECT_EQ(shares[1].micro_batch_size, 4);
}

TEST(PlanTest, SharesAddUpAndAreWholeForAnyProportion) {
  for (int64_t batch = 1; batch <= 40; ++batch) {
    for (const int64_t micro : {0, 1, 3, 4, 7}) {
      for (const std::vector<double>& weights :
           {std::vector<double>{1, 1, 1}, {0.1, 0.7, 0.2}, {5, 0, 1}, {1e-9, 1, 1}}) {
        int64_t sum = 0;
        for (const DataShare& share : make_shares(batch, 3, micro, weights)) {
          sum += share.num_samples;
          EXPECT_GE(share.num_samples, 0);
          EXPECT_EQ(share.num_micro_batches == 0, share.num_samples == 0);
        }
        EXPECT_EQ(sum, batch);
      }
    }
  }
}

TEST(PlanTest, JsonRoundTrip) {
  Plan plan = single_device_plan(10, 4, 7);
  plan.data_parallel = 2;
  plan.shares = make_shares(10, 2, 4, {});
  plan.bind["seq"] = 128;
  plan.schedule = ScheduleKind::kZeroBubbleH1;
  plan.stages[0].recompute = RecomputeMode::kSelective;
  plan.stages[0].recompute_nodes = {"a", "b"};
  plan.stages[0].recompute_runs = {{0, 2, RecomputeMode::kFull}, {4, 6, RecomputeMode::kNone}};
  plan.placements["w"] = {Placement::replicate(), Placement::shard(1)};
  const std::string text = plan_to_json(plan);
  EXPECT_EQ(plan_to_json(plan_from_json(text)), text);
}

void expect_refused(const std::string& json, const std::string& part) {
  try {
    plan_from_json(json);
    FAIL() << "accepted " << json;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_THAT(error.what(), HasSubstr(part));
  }
}

TEST(PlanTest, ComplaintsNameTheKeyTheValueAndWhatWasWanted) {
  expect_refused("{", "not JSON");
  expect_refused(R"({"shedule": "1f1b"})", "did you mean 'schedule'");
  expect_refused(R"({"schedule": "x"})", "wanted gpipe");
  expect_refused(R"({"data_parallel": "two"})", "plan.data_parallel is \"two\"");
  expect_refused(R"({"data_parallel": 0})", "wanted at least 1");
  expect_refused("{\"placements\": {\"w\": {\"tensor\": \"shard(x)\"}}}", "wanted shard(d)");
  expect_refused(
      R"({"shares": [{"num_samples": 5, "micro_batch_size": 2, "num_micro_batches": 2}]})",
      "make 3");
  expect_refused(R"({"stages": [{"nodes": [3, 1]}]})", "first <= last");
  expect_refused(
      R"({"stages": [{"nodes": [0, 3], "recompute": {"runs": [{"nodes": [2, 4], "mode": "full"}]}}]})",
      "[2, 4] should lie within [0, 3]");
}

TEST(PlanTest, DeepOrLongValuesEndInAShortMessage) {
  for (const int depth : {201, 100'000}) {
    for (const char* form : {"[", "{\"a\":"}) {
      std::string text;
      for (int i = 0; i < depth; ++i) {
        text += form;
      }
      expect_refused(text, "the plan has lists and objects nested more than 200 deep");
    }
  }
  expect_refused(std::string(200, '[') + std::string(200, ']'), "... (400 characters)");
  expect_refused("{\"schedule\": 1e999}", "a number that is too large");
  expect_refused("{\"zero_stage\":\n 1,,}", "at line 2, column 4, where it has ','");
  expect_refused("{\"zero_stage\":\n ", "ends too early, at line 2");
}

TEST(PlanTest, TensorRanksAreNeighbours) {
  Plan plan;
  plan.data_parallel = 2;
  plan.tensor_parallel = 3;
  plan.pipeline_parallel = 2;
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    const RankCoordinates at = rank_coordinates(plan, rank);
    EXPECT_EQ(rank_of(plan, at), rank);
    EXPECT_EQ(at.tensor_rank, rank % 3);
  }
}

}  // namespace
}  // namespace trainrt
