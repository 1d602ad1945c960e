// What a slow device owes is slept off in the end, however small its kernels are.
#include "runtime/slowdown.h"

#include <gtest/gtest.h>

namespace trainrt {
namespace {

using std::chrono::microseconds;
using Duration = Slowdown::Duration;

// Time that passes by being told of.
struct Sleeper {
  Duration slack, slept{0};
  int sleeps = 0;
  Slowdown::Sleep sleep() {
    return [this](Duration time) {
      ++sleeps;
      slept += time + slack;
      return time + slack;
    };
  }
};

TEST(SlowdownTest, SmallKernelsTakeTheirTimeBySpeedAndNoMore) {
  for (const double speed : {0.9, 0.5, 0.25}) {
    Sleeper sleeper{microseconds(60)};
    Slowdown device(speed, sleeper.sleep());
    constexpr int kKernels = 10000;
    for (int i = 0; i < kKernels; ++i) {
      device.worked(microseconds(5));
    }
    device.settle();
    const double kernels = 5e-6 * kKernels;
    const double took = kernels + std::chrono::duration<double>(sleeper.slept).count();
    EXPECT_NEAR(took, kernels / speed, 100e-6) << speed;
    EXPECT_LT(sleeper.sleeps, kKernels / 50);
  }
}

TEST(SlowdownTest, NothingIsOwedOnceOthersAreTold) {
  Sleeper sleeper{Duration::zero()};
  Slowdown device(0.5, sleeper.sleep());
  device.worked(microseconds(300));
  EXPECT_EQ(sleeper.sleeps, 0);
  device.settle();
  EXPECT_EQ(sleeper.slept, microseconds(300));
  device.settle();
  EXPECT_EQ(sleeper.sleeps, 1);
}

// Cells of less than a sleep's slack, each settled: the mean is right all the same.
TEST(SlowdownTest, WhatWasOversleptIsTakenOff) {
  Sleeper sleeper{microseconds(60)};
  Slowdown device(0.5, sleeper.sleep());
  for (int i = 0; i < 1000; ++i) {
    device.worked(microseconds(10));
    device.settle();
  }
  EXPECT_NEAR(std::chrono::duration<double>(sleeper.slept).count(), 1000 * 10e-6, 100e-6);
}

TEST(SlowdownTest, AWholeDeviceNeverSleeps) {
  Sleeper sleeper{Duration::zero()};
  Slowdown device(1, sleeper.sleep());
  device.worked(std::chrono::seconds(1));
  device.settle();
  EXPECT_EQ(sleeper.sleeps, 0);
}

}  // namespace
}  // namespace trainrt
