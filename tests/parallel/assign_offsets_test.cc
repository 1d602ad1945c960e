#include "parallel/assign_offsets.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace trainrt {
namespace {

bool overlap_in_time(const Lifetime& a, const Lifetime& b) {
  return a.first_use <= b.last_use && b.first_use <= a.last_use;
}

// Most bytes alive at one instant: no assignment needs less.
int64_t lower_bound(const std::vector<Lifetime>& lives) {
  int64_t most = 0;
  for (const Lifetime& at : lives) {
    int64_t sum = 0;
    for (const Lifetime& life : lives) {
      if (life.first_use <= at.first_use && at.first_use <= life.last_use) {
        sum += OffsetAssigner::align(life.bytes);
      }
    }
    most = std::max(most, sum);
  }
  return most;
}

void expect_valid(const std::vector<Lifetime>& lives) {
  std::vector<int64_t> offsets;
  const int64_t extent = assign_offsets(lives, &offsets);
  ASSERT_EQ(offsets.size(), lives.size());
  int64_t top = 0;
  for (size_t i = 0; i < lives.size(); ++i) {
    ASSERT_EQ(offsets[i] % kArenaAlignment, 0);
    top = std::max(top, offsets[i] + OffsetAssigner::align(lives[i].bytes));
    for (size_t j = 0; j < i; ++j) {
      const bool apart =
          offsets[i] + lives[i].bytes <= offsets[j] || offsets[j] + lives[j].bytes <= offsets[i];
      ASSERT_TRUE(apart || !overlap_in_time(lives[i], lives[j])) << i << " and " << j;
    }
  }
  EXPECT_EQ(extent, top);
  EXPECT_GE(extent, lower_bound(lives));
}

// Random lives as a training step has them: a stack of long ones, many short ones around.
std::vector<Lifetime> random_lives(std::mt19937& random, int count, int instants) {
  std::vector<Lifetime> lives;
  for (int i = 0; i < count; ++i) {
    const int first = static_cast<int>(random() % static_cast<unsigned>(instants));
    const bool is_long = random() % 4 == 0;
    const int last = is_long ? instants - 1 - first / 2
                             : std::min(instants - 1, first + static_cast<int>(random() % 6));
    lives.push_back(
        {static_cast<int64_t>(random() % 5000), std::min(first, last), std::max(first, last)});
  }
  return lives;
}

TEST(AssignOffsetsTest, LivesThatOverlapInTimeAreApartInSpace) {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    expect_valid(random_lives(
        random, 1 + static_cast<int>(random() % 150), 1 + static_cast<int>(random() % 700)));
  }
}

TEST(AssignOffsetsTest, ReachesTheLowerBoundOnStacks) {
  // What a forward leaves and a backward takes in reverse order.
  std::vector<Lifetime> lives;
  for (int i = 0; i < 50; ++i) {
    lives.push_back({64 * (1 + i % 7), i, 100 - i});
  }
  std::vector<int64_t> offsets;
  EXPECT_EQ(assign_offsets(lives, &offsets), lower_bound(lives));
}

TEST(AssignOffsetsTest, StaysNearTheLowerBoundOnRandomLives) {
  std::mt19937 random(7);
  double sum = 0;
  const int rounds = 30;
  for (int round = 0; round < rounds; ++round) {
    const std::vector<Lifetime> lives = random_lives(random, 200, 400);
    std::vector<int64_t> offsets;
    sum += static_cast<double>(assign_offsets(lives, &offsets)) /
           static_cast<double>(lower_bound(lives));
  }
  EXPECT_LT(sum / rounds, 1.08);
}

TEST(AssignOffsetsTest, EmptyTensorsTakeNoRoom) {
  std::vector<int64_t> offsets;
  EXPECT_EQ(assign_offsets({{0, 0, 3}, {0, 1, 1}}, &offsets), 0);
  EXPECT_EQ(assign_offsets({}, &offsets), 0);
}

TEST(AssignOffsetsTest, NothingStraddlesTheBarrier) {
  std::mt19937 random(3);
  OffsetAssigner assigner(50);
  const int64_t barrier = 4096;
  assigner.insert({1000, 0, 49}, 512);
  for (const Lifetime& life : random_lives(random, 100, 50)) {
    if (life.bytes > 0) {
      const int64_t offset = assigner.place(life, barrier);
      EXPECT_TRUE(offset >= barrier || offset + life.bytes <= barrier);
    }
  }
}

}  // namespace
}  // namespace trainrt
