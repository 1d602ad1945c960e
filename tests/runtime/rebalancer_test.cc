// Decisions from times that are told, not measured.
#include "runtime/rebalancer.h"

#include <gmock/gmock.h>

namespace trainrt {
namespace {

using ::testing::ElementsAre;
using Units = std::vector<int64_t>;

// Steps until a decision, at most `steps`; ranks take `seconds` per unit.
std::optional<Units> decide(Rebalancer& rebalancer,
                            const std::vector<double>& seconds,
                            int steps = 20) {
  for (int step = 0; step < steps; ++step) {
    std::vector<double> worked;
    for (size_t rank = 0; rank < seconds.size(); ++rank) {
      worked.push_back(seconds[rank] * static_cast<double>(rebalancer.units()[rank]));
    }
    if (auto units = rebalancer.observe(worked)) {
      return units;
    }
  }
  return std::nullopt;
}

TEST(RebalancerTest, EqualRanksStayAsTheyAre) {
  Rebalancer rebalancer({4, 4, 4}, 1);
  EXPECT_EQ(decide(rebalancer, {0.1, 0.1, 0.1}), std::nullopt);
  EXPECT_EQ(decide(rebalancer, {0.1, 0.105, 0.1}), std::nullopt);
}

TEST(RebalancerTest, ADeviceThatSlowsGetsLess) {
  Rebalancer rebalancer({4, 4}, 1);
  EXPECT_EQ(decide(rebalancer, {0.1, 0.1}, 12), std::nullopt);
  const auto units = decide(rebalancer, {0.1, 0.3});
  ASSERT_TRUE(units.has_value());
  EXPECT_THAT(*units, ElementsAre(6, 2));
  EXPECT_NEAR(rebalancer.promised(), 0.5, 1e-12);
  rebalancer.adopt(*units);
  EXPECT_EQ(decide(rebalancer, {0.1, 0.3}), std::nullopt);  // and it stays so
  const auto back = decide(rebalancer, {0.1, 0.1});         // until the device recovers
  ASSERT_TRUE(back.has_value());
  EXPECT_THAT(*back, ElementsAre(4, 4));
}

TEST(RebalancerTest, OneSlowStepDecidesNothing) {
  Rebalancer rebalancer({4, 4}, 1);
  for (int step = 0; step < 50; ++step) {
    EXPECT_EQ(rebalancer.observe({0.4, step % 5 == 2 ? 4.0 : 0.4}), std::nullopt);
  }
}

TEST(RebalancerTest, NoRankThatWorksIsLeftWithoutWorkAndNoIdleOneGetsAny) {
  Rebalancer rebalancer({4, 0, 4}, 1);
  const auto units = decide(rebalancer, {0.001, 0, 10});
  ASSERT_TRUE(units.has_value());
  EXPECT_THAT(*units, ElementsAre(7, 0, 1));
  Rebalancer pipeline({4, 4}, 2);
  EXPECT_THAT(*decide(pipeline, {0.001, 10}), ElementsAre(6, 2));
}

TEST(RebalancerTest, MemoryThatIsFullKeepsARankAsItIs) {
  Rebalancer rebalancer({4, 4, 4}, 1);
  const auto units = decide(rebalancer, {0.1, 0.1, 0.4});
  ASSERT_TRUE(units.has_value());
  EXPECT_THAT(*units, ElementsAre(5, 6, 1));
  const auto capped = rebalancer.reject({true, false, false});
  ASSERT_TRUE(capped.has_value());
  EXPECT_THAT(*capped, ElementsAre(4, 7, 1));
  EXPECT_EQ(rebalancer.reject({true, true, false}), std::nullopt);
}

struct Cost {
  double fixed, per_unit;
};

// Moves within `steps`, every one of which is taken.
int moves(Rebalancer& rebalancer, const std::vector<Cost>& costs, int steps) {
  int count = 0;
  for (int step = 0; step < steps; ++step) {
    std::vector<double> worked;
    for (size_t rank = 0; rank < costs.size(); ++rank) {
      worked.push_back(costs[rank].fixed +
                       costs[rank].per_unit * static_cast<double>(rebalancer.units()[rank]));
    }
    if (const auto units = rebalancer.observe(worked)) {
      rebalancer.adopt(*units);
      ++count;
    }
  }
  return count;
}

// The least time that the slowest rank can take, by trying every share of two ranks.
double optimum(const std::vector<Cost>& costs, int64_t total) {
  double best = 1e300;
  for (int64_t own = 1; own < total; ++own) {
    best =
        std::min(best,
                 std::max(costs[0].fixed + costs[0].per_unit * static_cast<double>(own),
                          costs[1].fixed + costs[1].per_unit * static_cast<double>(total - own)));
  }
  return best;
}

TEST(RebalancerTest, SettlesAtTheOptimumWhereAPartOfTheStepIsFixed) {
  for (const std::vector<Cost>& costs : {std::vector<Cost>{{0.02, 0.001}, {0.2, 0.001}},
                                         {{0.1, 0.001}, {0.1, 0.004}},
                                         {{0, 0.001}, {0.05, 0.002}},
                                         {{0.3, 0.0001}, {0.6, 0.0002}}}) {
    Rebalancer rebalancer({171, 171}, 1);
    EXPECT_LE(moves(rebalancer, costs, 60), 3);
    double slowest = 0;
    for (size_t rank = 0; rank < 2; ++rank) {
      slowest = std::max(
          slowest,
          costs[rank].fixed + costs[rank].per_unit * static_cast<double>(rebalancer.units()[rank]));
    }
    EXPECT_LE(slowest, 1.12 * optimum(costs, 342));
    EXPECT_EQ(moves(rebalancer, costs, 500), 0);
  }
}

TEST(RebalancerTest, SeveralRanksSettleToo) {
  Rebalancer rebalancer({64, 64, 64, 64}, 1);
  const std::vector<Cost> costs = {{0.1, 0.001}, {0.05, 0.002}, {0.1, 0.004}, {0.02, 0.001}};
  EXPECT_LE(moves(rebalancer, costs, 100), 4);
  EXPECT_EQ(moves(rebalancer, costs, 500), 0);
}

TEST(RebalancerTest, TimesThatSharesDoNotChangeEndTheMoving) {
  Rebalancer rebalancer({171, 171}, 1);
  const std::vector<Cost> costs = {{0.1, 0}, {0.3, 0}};
  EXPECT_LE(moves(rebalancer, costs, 100), 2);
  EXPECT_EQ(moves(rebalancer, costs, 500), 0);
  // A device that recovers is noticed all the same.
  EXPECT_GE(moves(rebalancer, {{0, 0.001}, {0, 0.001}}, 50), 1);
}

// Times of no form at all: moves that bring nothing come to an end.
// Times that change by themselves, as on a busy machine, move little and ever more rarely.
TEST(RebalancerTest, ABusyMachineIsLookedAtEverLonger) {
  Rebalancer rebalancer({18, 14}, 1);
  int count = 0;
  for (int step = 0; step < 400; ++step) {
    const double noise = step / 11 % 2 == 0 ? 1.3 : 0.8;
    const auto units =
        rebalancer.observe({0.001 * noise * static_cast<double>(rebalancer.units()[0]),
                            0.001 * static_cast<double>(rebalancer.units()[1])});
    if (units) {
      rebalancer.adopt(*units);
      ++count;
    }
  }
  EXPECT_LE(count, 7);
}

TEST(RebalancerTest, BrokenPromisesEndTheMoving) {
  Rebalancer rebalancer({171, 171}, 1);
  int count = 0, late = 0;
  for (int step = 0; step < 400; ++step) {
    // The rank with less work is the slower one, be it which it may.
    const bool first = rebalancer.units()[0] < rebalancer.units()[1];
    if (const auto units = rebalancer.observe({first ? 0.3 : 0.1, first ? 0.1 : 0.3})) {
      rebalancer.adopt(*units);
      ++count;
      late += step > 100 ? 1 : 0;
    }
  }
  EXPECT_LE(count, 4);
  EXPECT_EQ(late, 0);
}

TEST(RebalancerTest, TimesTooShortToBeMeasuredDecideNothing) {
  Rebalancer rebalancer({4, 4}, 1);
  EXPECT_EQ(decide(rebalancer, {0.1, 0}), std::nullopt);
}

}  // namespace
}  // namespace trainrt
