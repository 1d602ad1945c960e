#include "parallel/message_lanes.h"

#include <gtest/gtest.h>

#include "graph/base/error.h"

namespace trainrt {
namespace {

using Lanes = std::map<int, int>;

TEST(MessageLanesTest, MessagesInOneOrderShareALane) {
  EXPECT_EQ(share_lanes({1, 2, 1, 2}, {1, 2, 1, 2}), (Lanes{{1, 0}, {2, 0}}));
}

TEST(MessageLanesTest, ThoseThatOvertakeEachOtherDoNot) {
  EXPECT_EQ(share_lanes({1, 2, 3}, {2, 3, 1}), (Lanes{{1, 0}, {2, 1}, {3, 1}}));
  // In order within a micro-batch, but not between them.
  EXPECT_EQ(share_lanes({1, 1, 2, 2}, {1, 2, 1, 2}), (Lanes{{1, 0}, {2, 1}}));
}

TEST(MessageLanesTest, EachMessageIsReceivedOnce) {
  EXPECT_THROW(share_lanes({1, 2}, {1}), Error);
  EXPECT_THROW(share_lanes({1, 1}, {1}), Error);
  EXPECT_TRUE(share_lanes({}, {}).empty());
}

}  // namespace
}  // namespace trainrt
