#include "runtime/sample_order.h"

#include <gtest/gtest.h>

#include <set>

namespace trainrt {
namespace {

TEST(SampleOrderTest, EveryEpochIsAPermutation) {
  for (const int64_t n : {1, 2, 3, 7, 64, 1000}) {
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      std::set<int64_t> seen;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t index = shuffled_index(5, epoch, n, i);
        EXPECT_GE(index, 0);
        EXPECT_LT(index, n);
        seen.insert(index);
      }
      EXPECT_EQ(static_cast<int64_t>(seen.size()), n);
    }
  }
}

TEST(SampleOrderTest, SeedAndEpochChangeTheOrder) {
  int fixed = 0, same_epoch = 0, same_seed = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    fixed += shuffled_index(1, 0, 1000, i) == i ? 1 : 0;
    same_epoch += shuffled_index(1, 0, 1000, i) == shuffled_index(1, 1, 1000, i) ? 1 : 0;
    same_seed += shuffled_index(1, 0, 1000, i) == shuffled_index(2, 0, 1000, i) ? 1 : 0;
  }
  // A random permutation has one fixed point on average; twenty are beyond chance.
  EXPECT_LT(fixed, 20);
  EXPECT_LT(same_epoch, 20);
  EXPECT_LT(same_seed, 20);
}

TEST(SampleOrderTest, ShuffledNeighboursAreFarApart) {
  double distance = 0;
  const int64_t n = 10000;
  for (int64_t i = 0; i + 1 < n; ++i) {
    distance +=
        std::abs(static_cast<double>(shuffled_index(3, 0, n, i + 1) - shuffled_index(3, 0, n, i)));
  }
  // A third of n for independent uniform positions.
  EXPECT_NEAR(distance / n, n / 3.0, n / 30.0);
}

TEST(SampleOrderTest, TheLastStepOfAnEpochIsShort) {
  EXPECT_EQ(samples_at(0, 32, 100), 32);
  EXPECT_EQ(samples_at(96, 32, 100), 4);
  EXPECT_EQ(samples_at(100, 32, 100), 32);
  EXPECT_EQ(samples_at(0, 32, 10), 10);
}

}  // namespace
}  // namespace trainrt
