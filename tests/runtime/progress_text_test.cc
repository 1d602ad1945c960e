#include <gmock/gmock.h>

#include <limits>

#include "runtime/metrics.h"

namespace trainrt {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

StepMetrics some_step() {
  StepMetrics m;
  m.step = 50;
  m.loss = 1.25;
  m.lr = 0.001;
  m.grad_norm = 3;
  m.peak_bytes = {3 << 20, 5 << 20};
  return m;
}

ProgressFigures some_figures() {
  ProgressFigures figures;
  figures.total_steps = 100;
  figures.samples_per_second = 12345;
  figures.seconds_left = 75;
  figures.bar = true;
  return figures;
}

TEST(ProgressTextTest, HoldsEveryFigureWhereThereIsRoom) {
  const std::string text = progress_text(some_step(), some_figures(), 0);
  for (const char* part : {"[##########..........]",
                           "step 50/100",
                           "loss 1.2500",
                           "lr 0.001",
                           "grad norm 3",
                           "12345 samples/s",
                           "5.0 MiB",
                           "1:15 left"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(ProgressTextTest, FitsTheTerminal) {
  for (int width = 1; width < 140; ++width) {
    const std::string text = progress_text(some_step(), some_figures(), width);
    EXPECT_LE(static_cast<int>(text.size()), width);
    if (width >= 30) {
      EXPECT_THAT(text, AllOf(HasSubstr("step 50/100"), HasSubstr("loss 1.2500")));
    }
  }
}

TEST(ProgressTextTest, AStepWithoutAnUpdateIsCalledSkipped) {
  StepMetrics m = some_step();
  m.skipped = true;
  m.grad_norm = std::numeric_limits<double>::infinity();
  const std::string text = progress_text(m, some_figures(), 0);
  EXPECT_THAT(text, HasSubstr("skipped"));
  EXPECT_THAT(text, Not(HasSubstr("grad norm")));
}

TEST(ProgressTextTest, BytesHaveTheUnitThatSuitsThem) {
  EXPECT_EQ(bytes_text(999), "999 bytes");
  EXPECT_EQ(bytes_text(1536), "1.5 KiB");
  EXPECT_EQ(bytes_text(int64_t{100} << 30), "100 GiB");
}

}  // namespace
}  // namespace trainrt
