#include "runtime/lr_schedule.h"

#include <gtest/gtest.h>

namespace trainrt {
namespace {

TEST(LrScheduleTest, ConstantStaysAtThePeak) {
  const LrSchedule schedule{LrScheduleKind::kConstant, 0.5, 0, 10};
  EXPECT_EQ(schedule.at(0), 0.5);
  EXPECT_EQ(schedule.at(9), 0.5);
}

TEST(LrScheduleTest, WarmUpRisesLinearlyToThePeak) {
  const LrSchedule schedule{LrScheduleKind::kConstant, 1.0, 4, 10};
  EXPECT_DOUBLE_EQ(schedule.at(0), 0.25);
  EXPECT_DOUBLE_EQ(schedule.at(1), 0.5);
  EXPECT_DOUBLE_EQ(schedule.at(3), 1.0);
  EXPECT_DOUBLE_EQ(schedule.at(4), 1.0);
}

TEST(LrScheduleTest, LinearAndCosineFallTowardsZero) {
  const LrSchedule linear{LrScheduleKind::kLinear, 1.0, 2, 12};
  EXPECT_DOUBLE_EQ(linear.at(2), 1.0);
  EXPECT_DOUBLE_EQ(linear.at(7), 0.5);
  EXPECT_DOUBLE_EQ(linear.at(12), 0.0);
  const LrSchedule cosine{LrScheduleKind::kCosine, 2.0, 0, 10};
  EXPECT_DOUBLE_EQ(cosine.at(0), 2.0);
  EXPECT_NEAR(cosine.at(5), 1.0, 1e-15);
  EXPECT_NEAR(cosine.at(10), 0.0, 1e-15);
}

}  // namespace
}  // namespace trainrt
