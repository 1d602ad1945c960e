// What NCCL is reckoned to take of a GPU's memory.
#include "parallel/communicator_memory.h"

#include <gtest/gtest.h>

namespace trainrt {
namespace {

TEST(CommunicatorMemoryTest, EachGroupOfARankTakesItsOwn) {
  EXPECT_EQ(communicator_bytes(1, 1, 1), 0);
  const int64_t two = communicator_bytes(2, 1, 1);
  EXPECT_GT(two, 0);
  EXPECT_GT(communicator_bytes(8, 1, 1), two);
  EXPECT_EQ(communicator_bytes(1, 2, 1), two);
  EXPECT_EQ(communicator_bytes(2, 2, 1), 2 * two);
  // Of a pipeline, channels of messages alone.
  EXPECT_GT(communicator_bytes(1, 1, 2), 0);
  EXPECT_LT(communicator_bytes(1, 1, 8), two);
}

}  // namespace
}  // namespace trainrt
