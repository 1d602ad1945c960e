// The replay against closed forms for equal stages, and the lower bounds against the replay on
// random pipelines.
#include "planner/simulator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace trainrt {
namespace {

ReplayInput equal_stages(int count, double forward, double backward, double weight = 0) {
  ReplayInput input;
  input.stages.assign(static_cast<size_t>(count), {forward, backward, weight});
  input.transfer.assign(static_cast<size_t>(count - 1), 0);
  return input;
}

ReplayInput random_stages(int count, double most_transfer, std::mt19937* random) {
  std::uniform_real_distribution<double> time(0.2, 2), transfer(0, most_transfer);
  ReplayInput input;
  for (int i = 0; i < count; ++i) {
    const double forward = time(*random);
    const double backward = forward * (1 + time(*random));
    input.stages.push_back({forward, backward, backward * 0.4});
    if (i > 0) {
      input.transfer.push_back(transfer(*random));
    }
  }
  return input;
}

TEST(SimulatorTest, EqualStagesMeetTheClosedForms) {
  const double f = 1, b = 2.5;
  for (const int p : {1, 2, 4, 7}) {
    for (const int m : {1, 3, 8, 16}) {
      const auto seconds = [&](ScheduleKind kind, int v, const ReplayInput& input) {
        return replay_schedule(make_schedule(kind, p, m, v), input).seconds;
      };
      const double expected = (m + p - 1) * (f + b);
      EXPECT_NEAR(seconds(ScheduleKind::kGPipe, 1, equal_stages(p, f, b)), expected, 1e-9);
      EXPECT_NEAR(seconds(ScheduleKind::k1F1B, 1, equal_stages(p, f, b)), expected, 1e-9);
      if (m % p == 0) {
        const int v = 3;
        EXPECT_NEAR(seconds(ScheduleKind::kInterleaved, v, equal_stages(p * v, f / v, b / v)),
                    (m + (p - 1.0) / v) * (f + b),
                    1e-9)
            << "p " << p << " m " << m;
      }
    }
  }
}

// What goes over from step to step is idle nowhere: m times the slowest stage.
TEST(SimulatorTest, StepsThatGoOverIntoEachOtherHaveNoBubble) {
  std::mt19937 random(3);
  for (const int p : {1, 2, 4, 7}) {
    for (const int m : {p, p + 1, 3 * p}) {
      const Schedule whole = make_schedule(ScheduleKind::k2BW, p, m, 1);
      const Replay replay = replay_steady(whole, equal_stages(p, 1, 2.5));
      EXPECT_NEAR(replay.seconds, 3.5 * m, 1e-9) << "p " << p << " m " << m;
      EXPECT_NEAR(replay.rank_compute[0], 3.5 * m, 1e-9);
      const Schedule window = make_window(whole, StepWindow::kSteady);
      for (size_t rank = 0; rank < window.ranks.size(); ++rank) {
        EXPECT_EQ(replay.cells[rank].size(), window.ranks[rank].size());
        EXPECT_GE(replay.cells[rank][0].start, -1e-9);
      }
      const ReplayInput uneven = random_stages(p, 0.3, &random);
      const double seconds = replay_steady(whole, uneven).seconds;
      EXPECT_GE(seconds, lower_bound_steady(uneven, m) * (1 - 1e-9));
      EXPECT_LE(seconds, replay_schedule(whole, uneven).seconds * (1 + 1e-9));
    }
  }
}

// Zero-bubble H1 fills the drain with weight gradients: m (F + B) + (p-1)(T_F + T_B - T_W) where
// the three parts take equal time.
TEST(SimulatorTest, ZeroBubbleFillsTheDrain) {
  const double t = 1;
  for (const int p : {2, 4, 8}) {
    const int m = 4 * p;
    const Schedule schedule = make_schedule(ScheduleKind::kZeroBubbleH1, p, m, 1);
    const double seconds = replay_schedule(schedule, equal_stages(p, t, 2 * t, t)).seconds;
    EXPECT_NEAR(seconds, m * 3 * t + (p - 1) * t, 1e-9) << "p " << p;
    const Schedule plain = make_schedule(ScheduleKind::k1F1B, p, m, 1);
    EXPECT_LT(seconds, replay_schedule(plain, equal_stages(p, t, 2 * t)).seconds);
  }
}

TEST(SimulatorTest, BlockingTransfersCostAtLeastAsMuch) {
  std::mt19937 random(3);
  for (int round = 0; round < 100; ++round) {
    const int p = 2 + static_cast<int>(random() % 6), m = 1 + static_cast<int>(random() % 20);
    const Schedule schedule = make_schedule(ScheduleKind::k1F1B, p, m, 1);
    ReplayInput input = random_stages(p, 0.2, &random);
    const double free = replay_schedule(schedule, input).seconds;
    input.blocking_transfers = true;
    EXPECT_GE(replay_schedule(schedule, input).seconds, free - 1e-9);
  }
}

TEST(SimulatorTest, AShortLastMicroBatchTakesLess) {
  const Schedule schedule = make_schedule(ScheduleKind::k1F1B, 1, 4, 1);
  ReplayInput input = equal_stages(1, 1, 2);
  input.micro_batch_scale = {1, 1, 1, 0.5};
  EXPECT_NEAR(replay_schedule(schedule, input).seconds, 10.5, 1e-12);
}

TEST(LowerBoundTest, IsNeverAboveTheReplayOf1F1B) {
  std::mt19937 random(17);
  double worst_gap = 0;
  for (int round = 0; round < 4000; ++round) {
    const int p = 1 + static_cast<int>(random() % 16);
    const int m = 1 + static_cast<int>(random() % (8 * static_cast<unsigned>(p)));
    const double most = round % 3 == 0 ? 0 : round % 3 == 1 ? 0.3 : 2;
    const ReplayInput input = random_stages(p, most, &random);
    const double seconds =
        replay_schedule(make_schedule(ScheduleKind::k1F1B, p, m, 1), input).seconds;
    const double bound = lower_bound_1f1b(input, m);
    ASSERT_LE(bound, seconds * (1 + 1e-12)) << "p " << p << " m " << m << " round " << round;
    if (most == 0) {
      worst_gap = std::max(worst_gap, seconds / bound - 1);
    }
  }
  EXPECT_LT(worst_gap, 0.2);  // and close enough to prune by
}

TEST(LowerBoundTest, IsNeverAboveTheReplayOfAnySchedule) {
  std::mt19937 random(23);
  for (int round = 0; round < 3000; ++round) {
    const int p = 1 + static_cast<int>(random() % 8);
    const int v = round % 4 == 2 ? 1 + static_cast<int>(random() % 4) : 1;
    int m = 1 + static_cast<int>(random() % 40);
    if (v > 1) {
      m = (m + p - 1) / p * p;
    }
    const ScheduleKind kinds[] = {ScheduleKind::k1F1B,
                                  ScheduleKind::kGPipe,
                                  ScheduleKind::kInterleaved,
                                  ScheduleKind::kZeroBubbleH1};
    const ScheduleKind kind = kinds[round % 4];
    ReplayInput input = random_stages(p * v, round % 2 == 0 ? 0.0 : 0.5, &random);
    if (round % 5 == 0) {
      input.micro_batch_scale.assign(static_cast<size_t>(m), 1);
      input.micro_batch_scale.back() = 0.3;
    }
    const Schedule schedule = make_schedule(kind, p, m, v);
    const double seconds = replay_schedule(schedule, input).seconds;
    ASSERT_LE(lower_bound_any(schedule, input), seconds * (1 + 1e-12))
        << schedule_name(kind) << " p " << p << " m " << m << " v " << v << " round " << round;
    if (kind == ScheduleKind::k1F1B && v == 1) {
      ASSERT_LE(lower_bound_1f1b(input, m), seconds * (1 + 1e-12)) << "short, round " << round;
    }
  }
}

}  // namespace
}  // namespace trainrt
