#include "parallel/silence.h"

#include <gtest/gtest.h>

#include <thread>

namespace trainrt {
namespace {

// As all ranks of a job do when their terminal stops and continues them.
TEST(SilenceTest, DoesNotCountWhatItsOwnProcessSleptThrough) {
  Silence silence;
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  EXPECT_EQ(silence.look().count(), 0);
}

TEST(SilenceTest, LastsFromTheLastWordOn) {
  Silence silence;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto first = silence.look();
  EXPECT_GE(first, std::chrono::milliseconds(20));
  EXPECT_GE(silence.look(), first);
  silence.broken();
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_LT(silence.look() - std::chrono::milliseconds(20), first);
}

}  // namespace
}  // namespace trainrt
