#include "parallel/message_lanes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "graph/base/error.h"
#include "parallel/schedule.h"

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

Message sent(int peer, int tag) {
  return {peer, tag, true, 8};
}
Message received(int peer, int tag) {
  return {peer, tag, false, 8};
}

TEST(MessageLanesTest, ASenderThatWouldWaitForItsReceiverHasACopyMore) {
  // Rank 1 takes the first message when it has the third: with two on their way both would wait.
  const std::vector<std::vector<Message>> ranks = {
      {sent(1, 5), sent(1, 5), sent(1, 5), sent(1, 6)},
      {received(0, 6), received(0, 5), received(0, 5), received(0, 5)}};
  const std::vector<CopiesOfMessages> copies = copies_on_way(ranks, 2);
  EXPECT_EQ(copies[0], (CopiesOfMessages{{{1, 5}, 3}, {{1, 6}, 1}}));
  EXPECT_TRUE(copies[1].empty());
}

TEST(MessageLanesTest, RanksThatWaitForEachOtherAreTold) {
  EXPECT_THROW(copies_on_way({{received(1, 1), sent(1, 2)}, {received(0, 2), sent(0, 1)}}, 1),
               Error);
  EXPECT_THROW(copies_on_way({{received(1, 1)}, {}}, 1), Error);
}

TEST(MessageLanesTest, WhatARankKeepsForItselfNeedsNoCopy) {
  const auto copies = copies_on_way({{sent(0, 1), sent(0, 1), received(0, 1), received(0, 1)}}, 1);
  EXPECT_TRUE(copies[0].empty());
}

// Messages of one rank's row of a schedule whose stages send several tensors forth and back, to the
// next stage and past it, and receive them in another order than they are sent.
std::vector<Message> messages_of(const Schedule& schedule, int rank) {
  const int num_stages = schedule.num_stages * schedule.virtual_stages;
  const auto tag = [](int from, int to, int tensor) { return (from * 100 + to) * 10 + tensor; };
  std::vector<Message> messages;
  for (const Cell& cell : schedule.ranks[static_cast<size_t>(rank)]) {
    if (cell.phase == PhaseKind::kWeightGrad) {
      continue;
    }
    const int stage = cell.virtual_stage;
    const int step = cell.phase == PhaseKind::kForward ? 1 : -1;
    for (const bool sends : {false, true}) {
      for (const int distance : {1, 2}) {
        const int other = sends ? stage + step * distance : stage - step * distance;
        if (other < 0 || other >= num_stages) {
          continue;
        }
        for (int i = 0; i < 3; ++i) {
          const int tensor = sends ? i : 2 - i;
          messages.push_back({other % schedule.num_stages,
                              sends ? tag(stage, other, tensor) : tag(other, stage, tensor),
                              sends,
                              8});
        }
      }
    }
  }
  return messages;
}

class ScheduledMessagesTest : public ::testing::TestWithParam<ScheduleKind> {};

TEST_P(ScheduledMessagesTest, TwoCopiesOfEachAreEnough) {
  const ScheduleKind kind = GetParam();
  for (const int stages : {2, 3, 4}) {
    for (const int virtual_stages : {1, 2, 3}) {
      if ((kind == ScheduleKind::kInterleaved) != (virtual_stages > 1)) {
        continue;
      }
      for (const int micro_batches : {1, 2, 3, 4, 5, 8, 11}) {
        if (kind == ScheduleKind::k2BW && micro_batches < stages) {
          continue;
        }
        SCOPED_TRACE(testing::Message() << stages << " stages of " << virtual_stages << ", "
                                        << micro_batches << " micro-batches");
        const Schedule schedule = make_schedule(kind, stages, micro_batches, virtual_stages);
        std::vector<std::vector<Message>> ranks;
        for (int rank = 0; rank < stages; ++rank) {
          ranks.push_back(messages_of(schedule, rank));
        }
        for (const CopiesOfMessages& copies : copies_on_way(ranks, 2)) {
          for (const auto& [message, count] : copies) {
            EXPECT_EQ(count, std::min(2, micro_batches)) << "message " << message.second;
          }
        }
      }
    }
  }
}

// Steps that go over into each other send what is received after the next step's beginning.
TEST(WindowMessagesTest, TwoCopiesOfEachAreEnoughFromStepToStep) {
  for (const int stages : {2, 3, 4, 6}) {
    for (const int micro_batches : {6, 7, 11}) {
      SCOPED_TRACE(testing::Message() << stages << " stages, " << micro_batches);
      const Schedule whole = make_schedule(ScheduleKind::k2BW, stages, micro_batches, 1);
      std::vector<std::vector<Message>> ranks(static_cast<size_t>(stages));
      for (const StepWindow window :
           {StepWindow::kWhole, StepWindow::kFill, StepWindow::kSteady, StepWindow::kDrain}) {
        const Schedule step = make_window(whole, window);
        for (int rank = 0; rank < stages; ++rank) {
          const std::vector<Message> more = messages_of(step, rank);
          std::vector<Message>& own = ranks[static_cast<size_t>(rank)];
          own.insert(own.end(), more.begin(), more.end());
        }
      }
      for (const CopiesOfMessages& copies : copies_on_way(ranks, 2)) {
        for (const auto& [message, count] : copies) {
          EXPECT_EQ(count, 2) << "message " << message.second;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules,
                         ScheduledMessagesTest,
                         ::testing::Values(ScheduleKind::kGPipe,
                                           ScheduleKind::k1F1B,
                                           ScheduleKind::kInterleaved,
                                           ScheduleKind::kZeroBubbleH1,
                                           ScheduleKind::k2BW),
                         [](const auto& kind) {
                           std::string name = schedule_name(kind.param);
                           std::erase(name, '-');
                           return name;
                         });

}  // namespace
}  // namespace trainrt
