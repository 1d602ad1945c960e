#include <gtest/gtest.h>

#include <random>
#include <set>

#include "runtime/sample_order.h"
#include "runtime/training_job.h"

namespace trainrt {
namespace {

// Step by step, as the loader goes.
StepRange walked(const Options& options, int64_t n, int64_t first_step, int64_t start) {
  const bool endless = n == kEndlessSamples;
  const int64_t steps = options.steps ? *options.steps : options.epochs.value_or(1) * 100;
  const int64_t stop = endless || options.steps ? kEndlessSamples : options.epochs.value_or(1) * n;
  const int64_t last_step = endless || options.steps ? steps : kEndlessSamples;
  std::set<int64_t, std::greater<>> sizes;
  StepRange range;
  range.first_step = range.total_steps = first_step;
  range.start = range.stop = start;
  while (range.total_steps < last_step && range.stop < stop) {
    const int64_t samples = samples_at(range.stop, options.batch_size, n);
    sizes.insert(samples);
    range.stop += samples;
    ++range.total_steps;
  }
  range.sizes.assign(sizes.begin(), sizes.end());
  return range;
}

void expect_equal(const StepRange& a, const StepRange& b, const std::string& what) {
  EXPECT_EQ(a.first_step, b.first_step) << what;
  EXPECT_EQ(a.total_steps, b.total_steps) << what;
  EXPECT_EQ(a.start, b.start) << what;
  EXPECT_EQ(a.stop, b.stop) << what;
  EXPECT_EQ(a.sizes, b.sizes) << what;
}

TEST(StepRangeTest, TheClosedFormIsWhatTheLoaderGoesThrough) {
  std::mt19937 random(1);
  for (int round = 0; round < 5000; ++round) {
    Options options;
    options.batch_size = 1 + random() % 20;
    const int64_t n = random() % 8 == 0 ? kEndlessSamples : 1 + random() % 60;
    if (random() % 2 == 0) {
      options.steps = random() % 40;
    } else if (random() % 4 != 0) {
      options.epochs = random() % 6;
    }
    // Anywhere, as after a change of the batch size.
    const int64_t first_step = random() % 2 == 0 ? 0 : random() % 20;
    const int64_t start = first_step == 0 ? 0 : random() % 150;
    expect_equal(step_range(options, n, first_step, start),
                 walked(options, n, first_step, start),
                 "batch " + std::to_string(options.batch_size) + " of " + std::to_string(n) +
                     ", steps " + std::to_string(options.steps.value_or(-1)) + ", epochs " +
                     std::to_string(options.epochs.value_or(-1)) + ", from step " +
                     std::to_string(first_step) + " at " + std::to_string(start));
  }
}

TEST(StepRangeTest, AHundredMillionStepsAreCountedAtOnce) {
  Options options;
  options.batch_size = 32;
  options.steps = int64_t{1} << 50;
  const StepRange range = step_range(options, 1000, 0, 0);
  EXPECT_EQ(range.total_steps, int64_t{1} << 50);
  EXPECT_EQ(range.sizes, (std::vector<int64_t>{32, 8}));
}

}  // namespace
}  // namespace trainrt
