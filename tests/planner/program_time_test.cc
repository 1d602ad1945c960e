// Programs of hand-made ranks, replayed: who waits for whom, and for how long.
#include "planner/program_time.h"

#include <gtest/gtest.h>

#include "graph/base/error.h"
#include "parallel/cluster_file.h"

namespace trainrt {
namespace {

RankAct kernel(double seconds) {
  RankAct act;
  act.seconds = seconds;
  act.name = act.op_type = "Relu";
  return act;
}

RankAct message(RankAct::Kind kind, int peer) {
  RankAct act;
  act.kind = kind;
  act.name = act.op_type = kind == RankAct::Kind::kSend ? "Send" : "Recv";
  act.bytes = 1e6;
  act.group = "pipeline";
  act.peer = peer;
  return act;
}

RankAct all_reduce(const char* group) {
  RankAct act;
  act.kind = RankAct::Kind::kCollective;
  act.name = act.op_type = "AllReduce";
  act.bytes = 2e6;
  act.group = group;
  return act;
}

std::shared_ptr<const RankWork> work_of(RankCoordinates at, std::vector<RankAct> acts) {
  RankWork work;
  work.at = at;
  work.cells = {{PhaseKind::kForward, at.stage, 0}};
  work.acts = std::move(acts);
  return std::make_shared<const RankWork>(std::move(work));
}

// Two CPUs: a millisecond for a megabyte, two to receive it.
const char* const kTwoDevices = R"(
hosts:
  - {count: 1, devices: [{count: 2, type: cpu}],
     intra: {type: shared-memory, measured_ranks: 2, wake_seconds: 1e-5, calls: {
               all_reduce: [[1e6, 1e-3], [3e6, 3e-3]],
               send: [[1e5, 1e-4], [1e6, 1e-3]],
               receive: [[1e5, 2e-4], [1e6, 2e-3]]}}}
)";

Plan plan_of(int data, int pipeline) {
  Plan plan = single_device_plan(2, 1, 4);
  plan.data_parallel = data;
  plan.pipeline_parallel = pipeline;
  return plan;
}

TEST(ProgramTimeTest, AReceiverWaitsForItsMessage) {
  const ProgramTime time = replay_programs(
      plan_of(1, 2),
      parse_cluster(kTwoDevices, "two"),
      {0, 1},
      {work_of({0, 0, 0}, {kernel(1e-2), message(RankAct::Kind::kSend, 1), kernel(5e-3)}),
       work_of({1, 0, 0}, {kernel(1e-3), message(RankAct::Kind::kRecv, 0), kernel(2e-3)})});
  const double copy = 1e6 / 1e9;
  EXPECT_NEAR(time.ranks[0].end, 1e-2 + copy + 5e-3, 1e-9);
  EXPECT_NEAR(time.ranks[1].waiting, 1e-2 + copy + 1e-5 - 1e-3, 1e-9);
  EXPECT_NEAR(time.ranks[1].end, 1e-2 + copy + 1e-5 + 2 * copy + 2e-3, 1e-9);
  EXPECT_DOUBLE_EQ(time.seconds, std::max(time.ranks[0].end, time.ranks[1].end));
}

TEST(ProgramTimeTest, AMessageThatIsThereNeedsNoWaking) {
  const ProgramTime time =
      replay_programs(plan_of(1, 2),
                      parse_cluster(kTwoDevices, "two"),
                      {0, 1},
                      {work_of({0, 0, 0}, {message(RankAct::Kind::kSend, 1)}),
                       work_of({1, 0, 0}, {kernel(5e-3), message(RankAct::Kind::kRecv, 0)})});
  EXPECT_NEAR(time.ranks[1].end, 5e-3 + 2e-3, 1e-9);
  EXPECT_NEAR(time.ranks[1].waiting, 0, 1e-9);
}

TEST(ProgramTimeTest, ACollectiveBeginsWithItsLastRank) {
  const ProgramTime time =
      replay_programs(plan_of(2, 1),
                      parse_cluster(kTwoDevices, "two"),
                      {0, 1},
                      {work_of({0, 0, 0}, {kernel(4e-3), all_reduce("data"), kernel(1e-3)}),
                       work_of({0, 1, 0}, {kernel(9e-3), all_reduce("data"), kernel(1e-3)})});
  const double collective = 2e6 / 1e9 + 1e-5;  // rank 0 has gone to sleep
  EXPECT_NEAR(time.ranks[0].waiting, 5e-3, 1e-9);
  EXPECT_NEAR(time.ranks[1].waiting, 0, 1e-9);
  EXPECT_NEAR(time.ranks[0].gradients, collective, 1e-9);
  EXPECT_NEAR(time.seconds, 9e-3 + collective + 1e-3, 1e-9);
}

TEST(ProgramTimeTest, GroupsMeetApart) {
  // Two pipelines of two stages: rank = stage * 2 + data rank.
  const Topology four =
      parse_cluster("hosts:\n  - {count: 1, devices: [{count: 4, type: cpu}]}\n", "four");
  std::vector<std::shared_ptr<const RankWork>> work;
  for (int rank = 0; rank < 4; ++rank) {
    work.push_back(work_of({rank / 2, rank % 2, 0},
                           {kernel(rank < 2 ? 1e-3 : 8e-3), all_reduce("data"), kernel(1e-3)}));
  }
  const ProgramTime time = replay_programs(plan_of(2, 2), four, {0, 1, 2, 3}, work);
  EXPECT_LT(time.ranks[0].end, 8e-3);
  EXPECT_GT(time.ranks[2].end, 9e-3);
  EXPECT_EQ(time.ranks[0].waiting, 0);
}

// Where steps go over into each other, each rank's step counts from where it ended the one before.
TEST(ProgramTimeTest, StepsBeforeTheOneThatIsMeantAreLeftOut) {
  std::vector<std::shared_ptr<const RankWork>> work;
  for (const int stage : {0, 1}) {
    RankWork own;
    own.at = {stage, 0, 0};
    own.cells = {{PhaseKind::kForward, stage, 0}, {PhaseKind::kForward, stage, 1}};
    own.first_cell = 1;
    own.acts = {kernel(stage == 0 ? 3e-3 : 1e-3), kernel(2e-3), kernel(4e-3)};
    own.acts[1].cell = own.acts[2].cell = 1;
    work.push_back(std::make_shared<const RankWork>(std::move(own)));
  }
  const ProgramTime time =
      replay_programs(plan_of(1, 2), parse_cluster(kTwoDevices, "two"), {0, 1}, work);
  EXPECT_NEAR(time.seconds, 6e-3, 1e-12);
  for (size_t rank = 0; rank < 2; ++rank) {
    const RankTime& own = time.ranks[rank];
    const double begin = rank == 0 ? 2e-3 : 0;
    EXPECT_NEAR(own.compute, 6e-3, 1e-12);
    EXPECT_NEAR(own.end, begin + 6e-3, 1e-12);
    EXPECT_EQ(own.cell_start.size(), 1u);
    EXPECT_NEAR(own.cell_start[0], begin, 1e-12);
    EXPECT_NEAR(own.events.front().start_seconds, begin, 1e-12);
  }
}

TEST(ProgramTimeTest, ACircleIsAnError) {
  EXPECT_THROW(replay_programs(plan_of(1, 2),
                               parse_cluster(kTwoDevices, "two"),
                               {0, 1},
                               {work_of({0, 0, 0}, {message(RankAct::Kind::kRecv, 1)}),
                                work_of({1, 0, 0}, {message(RankAct::Kind::kRecv, 0)})}),
               Error);
}

}  // namespace
}  // namespace trainrt
