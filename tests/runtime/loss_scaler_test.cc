#include "runtime/loss_scaler.h"

#include <gtest/gtest.h>

#include <random>

#include "graph/base/error.h"

namespace trainrt {
namespace {

TEST(LossScalerTest, ShrinksOnOverflowAndGrowsAfterAnInterval) {
  LossScaler scaler({.init_scale = 8, .growth_interval = 3});
  const std::vector<std::pair<bool, double>> steps = {{false, 8},
                                                      {false, 8},
                                                      {false, 16},
                                                      {false, 16},
                                                      {true, 8},
                                                      {false, 8},
                                                      {false, 8},
                                                      {true, 4},
                                                      {false, 4},
                                                      {false, 4},
                                                      {false, 8}};
  for (size_t i = 0; i < steps.size(); ++i) {
    scaler.update(steps[i].first);
    EXPECT_EQ(scaler.scale(), steps[i].second) << "after step " << i;
  }
}

TEST(LossScalerTest, TheCountRestartsAtEveryChange) {
  LossScaler scaler({.init_scale = 4, .growth_interval = 2});
  scaler.update(false);
  EXPECT_EQ(scaler.finite_steps(), 1);
  scaler.update(true);
  EXPECT_EQ(scaler.finite_steps(), 0);
  scaler.update(false);
  scaler.update(false);
  EXPECT_EQ(scaler.finite_steps(), 0);
  EXPECT_EQ(scaler.scale(), 4);
}

TEST(LossScalerTest, ARestoredScalerGoesOnAsTheFirst) {
  std::mt19937 random(1);
  const LossScaling scaling{.init_scale = 1024, .growth_interval = 4};
  LossScaler whole(scaling);
  for (int step = 0; step < 200; ++step) {
    LossScaler resumed(scaling);
    resumed.restore(whole.scale(), whole.finite_steps());
    const bool overflow = random() % 6 == 0;
    whole.update(overflow);
    resumed.update(overflow);
    ASSERT_EQ(whole.scale(), resumed.scale());
    ASSERT_EQ(whole.finite_steps(), resumed.finite_steps());
  }
}

TEST(LossScalerTest, NeverGrowsOutOfFloat32) {
  LossScaler scaler({.init_scale = 1e38, .growth_factor = 10, .growth_interval = 1});
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 1e38);
}

TEST(LossScalerTest, GivesUpWhenNoScaleHelps) {
  LossScaler scaler({.init_scale = 1});
  EXPECT_THROW(
      {
        for (int i = 0; i < 100; ++i) {
          scaler.update(true);
        }
      },
      Error);
}

TEST(LossScalerTest, SwitchedOffTheScaleIsOne) {
  LossScaler scaler;
  scaler.update(false);
  scaler.restore(8, 1);
  EXPECT_FALSE(scaler.active());
  EXPECT_EQ(scaler.scale(), 1);
}

}  // namespace
}  // namespace trainrt
