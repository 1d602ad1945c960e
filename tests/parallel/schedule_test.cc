#include "parallel/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace trainrt {
namespace {

struct Case {
  ScheduleKind kind;
  int p, m, v;
};

// Every combination that exists with p 1..16, m 1..64, v 1..4 (v > 1 for interleaved only).
std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const ScheduleKind kind : {ScheduleKind::kGPipe,
                                  ScheduleKind::k1F1B,
                                  ScheduleKind::kInterleaved,
                                  ScheduleKind::kZeroBubbleH1,
                                  ScheduleKind::k2BW}) {
    for (int p = 1; p <= 16; ++p) {
      for (int m = kind == ScheduleKind::k2BW ? p : 1; m <= 64; ++m) {
        for (int v = 1; v <= (kind == ScheduleKind::kInterleaved ? 4 : 1); ++v) {
          cases.push_back({kind, p, m, v});
        }
      }
    }
  }
  return cases;
}

std::string describe(const Case& c) {
  return concat(schedule_name(c.kind), " p=", c.p, " m=", c.m, " v=", c.v);
}

// Seconds until every rank is done, each cell starting as soon as its inputs are there.
double makespan(const Schedule& schedule, double forward, double backward, double weight) {
  const int last = schedule.num_stages * schedule.virtual_stages - 1;
  const size_t m = static_cast<size_t>(schedule.num_micro_batches);
  std::vector<std::vector<double>> f(static_cast<size_t>(last) + 1, std::vector<double>(m, -1));
  std::vector<std::vector<double>> b = f;
  std::vector<size_t> position(schedule.ranks.size(), 0);
  std::vector<double> clock(schedule.ranks.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < schedule.ranks.size(); ++rank) {
      for (; position[rank] < schedule.ranks[rank].size(); ++position[rank], moved = true) {
        const Cell& cell = schedule.ranks[rank][position[rank]];
        const size_t s = static_cast<size_t>(cell.virtual_stage);
        const size_t i = static_cast<size_t>(cell.micro_batch);
        double ready = 0;
        if (cell.phase == PhaseKind::kForward) {
          ready = s == 0 ? 0 : f[s - 1][i];
        } else if (cell.phase == PhaseKind::kBackward) {
          ready = s == static_cast<size_t>(last) ? f[s][i] : b[s + 1][i];
        }
        if (ready < 0) {
          break;
        }
        const double seconds = cell.phase == PhaseKind::kForward    ? forward
                               : cell.phase == PhaseKind::kBackward ? backward
                                                                    : weight;
        clock[rank] = std::max(clock[rank], ready) + seconds;
        if (cell.phase != PhaseKind::kWeightGrad) {
          (cell.phase == PhaseKind::kForward ? f : b)[s][i] = clock[rank];
        }
      }
    }
  }
  return *std::max_element(clock.begin(), clock.end());
}

TEST(ScheduleTest, EveryCellOccursOnceAndNothingDeadlocks) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(describe(c));
    ASSERT_NO_THROW(verify_schedule(make_schedule(c.kind, c.p, c.m, c.v)));
  }
}

TEST(ScheduleTest, BackwardsOfAStageRunInMicroBatchOrder) {
  for (const Case& c : all_cases()) {
    const Schedule schedule = make_schedule(c.kind, c.p, c.m, c.v);
    for (const PhaseKind kind :
         {PhaseKind::kForward, PhaseKind::kBackward, PhaseKind::kWeightGrad}) {
      std::vector<int> next(static_cast<size_t>(c.p * c.v), 0);
      for (const std::vector<Cell>& row : schedule.ranks) {
        for (const Cell& cell : row) {
          if (cell.phase == kind) {
            ASSERT_EQ(cell.micro_batch, next[static_cast<size_t>(cell.virtual_stage)]++)
                << describe(c);
          }
        }
      }
    }
  }
}

TEST(ScheduleTest, InFlightCountsStayWithinTheKnownBounds) {
  for (const Case& c : all_cases()) {
    SCOPED_TRACE(describe(c));
    const Schedule schedule = make_schedule(c.kind, c.p, c.m, c.v);
    for (int stage = 0; stage < c.p * c.v; ++stage) {
      const int in_flight = max_in_flight(schedule, stage);
      switch (c.kind) {
        case ScheduleKind::kGPipe:
          ASSERT_EQ(in_flight, c.m);
          break;
        case ScheduleKind::k1F1B:
        case ScheduleKind::k2BW:
          ASSERT_EQ(in_flight, std::min(c.p - stage, c.m));
          break;
        case ScheduleKind::kZeroBubbleH1:
          ASSERT_EQ(in_flight, std::min(c.p, c.m));
          break;
        case ScheduleKind::kInterleaved:
          ASSERT_LE(in_flight, std::min(2 * c.p, c.m));
          break;
      }
    }
  }
}

TEST(ScheduleTest, BubblesMatchThePublishedFormulas) {
  for (int p = 1; p <= 8; ++p) {
    for (const int m : {2 * p, 3 * p + 1, 32}) {
      const double busy = 3.0 * m;
      EXPECT_DOUBLE_EQ(makespan(make_schedule(ScheduleKind::k1F1B, p, m, 1), 1, 2, 0),
                       busy + 3 * (p - 1));
      EXPECT_DOUBLE_EQ(makespan(make_schedule(ScheduleKind::kGPipe, p, m, 1), 1, 2, 0),
                       busy + 3 * (p - 1));
      // (p-1)(TF + TB - TW) with the three equal.
      EXPECT_DOUBLE_EQ(makespan(make_schedule(ScheduleKind::kZeroBubbleH1, p, m, 1), 1, 1, 1),
                       busy + (p - 1))
          << "p=" << p << " m=" << m;
    }
    for (int v = 1; v <= 4; ++v) {
      // 1/v of a stage per cell: (p-1)(TF + TB)/v, when p divides m.
      const int m = 4 * p;
      EXPECT_NEAR(makespan(make_schedule(ScheduleKind::kInterleaved, p, m, v), 1.0 / v, 2.0 / v, 0),
                  3.0 * m + 3.0 * (p - 1) / v,
                  1e-9)
          << "p=" << p << " v=" << v;
    }
  }
}

TEST(ScheduleTest, InterleavingWithAShortGroupIsNoSlowerThanWithAFullOne) {
  for (int p = 2; p <= 8; ++p) {
    for (int v = 2; v <= 4; ++v) {
      for (int m = 1; m <= 3 * p; ++m) {
        const int full = (m + p - 1) / p * p;
        EXPECT_LE(makespan(make_schedule(ScheduleKind::kInterleaved, p, m, v), 1, 2, 0),
                  makespan(make_schedule(ScheduleKind::kInterleaved, p, full, v), 1, 2, 0))
            << "p=" << p << " m=" << m << " v=" << v;
      }
    }
  }
}

// Steps that go over into each other, cell by cell: the ranks run their rows as far as they get. A
// rank has made `updates` updates, so it holds the weights W(updates) and W(updates - 1); W(0)
// twice before the first.
class WindowsTest : public ::testing::Test {
 protected:
  using Windows = std::vector<StepWindow>;

  void run(int p, int m, const Windows& windows) {
    const Schedule whole = make_schedule(ScheduleKind::k2BW, p, m, 1);
    std::vector<Schedule> steps;
    for (const StepWindow window : windows) {
      steps.push_back(make_window(whole, window));
    }
    const int last = static_cast<int>(windows.size()) * m;
    // By rank: forwards and backwards done, in the order of all steps' micro-batches.
    std::vector<int> forwards(static_cast<size_t>(p), 0), backwards = forwards, updates = forwards;
    std::vector<size_t> next(static_cast<size_t>(p), 0);
    std::vector<std::vector<int>> version(static_cast<size_t>(p),
                                          std::vector<int>(static_cast<size_t>(last), -1));
    const auto run_cell = [&](size_t rank, const Cell& cell) {
      int& done = cell.phase == PhaseKind::kForward ? forwards[rank] : backwards[rank];
      const int step = updates[rank] + (cell.ahead ? 1 : 0);
      if (cell.phase == PhaseKind::kForward
              ? rank > 0 && forwards[rank - 1] <= done
              : static_cast<int>(rank) + 1 < p && backwards[rank + 1] <= done) {
        return false;
      }
      EXPECT_EQ(done, step * m + cell.micro_batch);  // in order, each once
      // Ahead of the update a forward reads the newest weights, behind it the ones before.
      const int read = cell.ahead ? updates[rank] : std::max(0, updates[rank] - 1);
      EXPECT_EQ(read, std::max(0, step - 1)) << "the delayed rule";
      int& noted = version[rank][static_cast<size_t>(done)];
      if (cell.phase == PhaseKind::kForward) {
        noted = read;
      } else {
        EXPECT_LT(done, forwards[rank]);
        EXPECT_EQ(noted, read) << "forward and backward read the same weights";
      }
      ++done;
      EXPECT_LE(forwards[rank] - backwards[rank], p - static_cast<int>(rank));
      return true;
    };
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t rank = 0; rank < next.size(); ++rank) {
        while (static_cast<size_t>(updates[rank]) < steps.size()) {
          const std::vector<Cell>& row = steps[static_cast<size_t>(updates[rank])].ranks[rank];
          if (next[rank] == row.size()) {
            ++updates[rank];
            next[rank] = 0;
          } else if (run_cell(rank, row[next[rank]])) {
            ++next[rank];
          } else {
            break;
          }
          moved = true;
        }
      }
    }
    for (size_t rank = 0; rank < next.size(); ++rank) {
      EXPECT_EQ(forwards[rank], last);
      EXPECT_EQ(backwards[rank], last);
    }
  }
};

TEST_F(WindowsTest, EveryBackwardReadsTheWeightsOfItsForwardByTheDelayedRule) {
  using enum StepWindow;
  for (int p = 1; p <= 16; ++p) {
    for (int m = p; m <= 64; ++m) {
      SCOPED_TRACE(::testing::Message() << "p=" << p << " m=" << m);
      run(p, m, {kFill, kSteady, kSteady, kDrain, kWhole, kFill, kDrain});
      ASSERT_FALSE(HasFailure());
    }
  }
}

TEST_F(WindowsTest, ASteadyStepHasOneForwardForEachBackward) {
  for (int p = 1; p <= 16; ++p) {
    for (int m = p; m <= 64; ++m) {
      const Schedule steady =
          make_window(make_schedule(ScheduleKind::k2BW, p, m, 1), StepWindow::kSteady);
      for (const std::vector<Cell>& row : steady.ranks) {
        ASSERT_EQ(row.size(), static_cast<size_t>(2 * m));
        for (size_t i = 0; i < row.size(); ++i) {
          ASSERT_EQ(row[i].phase, i % 2 == 0 ? PhaseKind::kForward : PhaseKind::kBackward);
        }
      }
    }
  }
}

TEST_F(WindowsTest, PrintAsTables) {
  const Schedule whole = make_schedule(ScheduleKind::k2BW, 2, 3, 1);
  EXPECT_EQ(schedule_table(make_window(whole, StepWindow::kFill)),
            "0F0,0F1,0B0,0F2,0B1,0F0',0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  EXPECT_EQ(schedule_table(make_window(whole, StepWindow::kSteady)),
            "0F1,0B0,0F2,0B1,0F0',0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  EXPECT_EQ(schedule_table(make_window(whole, StepWindow::kDrain)),
            "0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
  EXPECT_EQ(schedule_table(make_window(whole, StepWindow::kWhole)), schedule_table(whole));
}

TEST(ScheduleTest, PrintsAsATable) {
  EXPECT_EQ(schedule_table(make_schedule(ScheduleKind::k1F1B, 2, 3, 1)),
            "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n");
}

TEST(ScheduleTest, RefusesWhatDoesNotExist) {
  EXPECT_THROW(make_schedule(ScheduleKind::k2BW, 4, 3, 1), Error);
  EXPECT_THROW(make_schedule(ScheduleKind::k1F1B, 2, 4, 2), Error);
  EXPECT_THROW(make_schedule(ScheduleKind::kGPipe, 2, 0, 1), Error);
}

TEST(ScheduleTest, VerifierFindsMissingCellsAndDeadlocks) {
  Schedule missing = make_schedule(ScheduleKind::k1F1B, 2, 2, 1);
  missing.ranks[0].pop_back();
  EXPECT_THROW(verify_schedule(missing), Error);
  Schedule stuck = make_schedule(ScheduleKind::k1F1B, 2, 2, 1);
  std::swap(stuck.ranks[0].front(), stuck.ranks[0].back());
  EXPECT_THROW(verify_schedule(stuck), Error);
}

}  // namespace
}  // namespace trainrt
