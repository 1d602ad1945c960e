// The allocator behind the memory plan: lifetimes -> offsets.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "parallel/memory_plan.h"

namespace trainrt {

// Places tensors one by one; the caller chooses the order.
class OffsetAssigner {
 public:
  explicit OffsetAssigner(int num_instants);

  // The best offset for a tensor alive in [first_use, last_use]; nothing placed straddles
  // `barrier`.
  int64_t place(const Lifetime& life, int64_t barrier = std::numeric_limits<int64_t>::max());
  // Enters a tensor whose offset is given.
  void insert(const Lifetime& life, int64_t offset);
  int64_t extent() const { return extent_; }

  static int64_t align(int64_t bytes) {
    return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
  }

 private:
  struct Placed {
    int64_t begin = 0;
    int64_t end = 0;
    int first_use = 0;
    int last_use = 0;
  };
  void overlapping(const Lifetime& life, std::vector<Placed>* found) const;

  int block_;
  std::vector<std::vector<Placed>> blocks_;
  std::vector<Placed> all_;
  std::vector<Placed> scratch_;
  int64_t extent_ = 0;
};

// Indices by falling size, longer lives first among equals.
std::vector<size_t> largest_first(const std::vector<Lifetime>& lifetimes);

}  // namespace trainrt
