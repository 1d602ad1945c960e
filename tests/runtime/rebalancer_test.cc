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

TEST(RebalancerTest, TimesTooShortToBeMeasuredDecideNothing) {
  Rebalancer rebalancer({4, 4}, 1);
  EXPECT_EQ(decide(rebalancer, {0.1, 0}), std::nullopt);
}

}  // namespace
}  // namespace trainrt
