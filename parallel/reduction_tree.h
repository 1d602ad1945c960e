// The order in which --reduction exact sums the logical shards of a step: an aligned binary tree
// over shards 0 .. num_shards-1. Node (level, i) covers the shards [i 2^level, (i + 1) 2^level)
// that exist; its sum is left + right, or its only child's sum. A rank with consecutive shards
// pre-sums the complete nodes among them and ships those, so the sum of all never depends on who
// has what.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/micro_batches.h"

namespace trainrt {

// What one rank does as its micro-batches come: attributes of AccumulateTree.
struct TreeAccumulation {
  std::vector<int64_t> slot;    // by micro-batch: where it is added
  std::vector<int64_t> first;   // 1: overwrites the slot
  std::vector<int64_t> merges;  // afterwards the top slot is added to the one below, so many times
  int64_t num_slots = 0;        // most that are open at once
  int64_t num_subtrees = 0;     // open at the end, in slots 0 .. num_subtrees-1
};
TreeAccumulation accumulate_tree(const std::vector<MicroBatchCut>& cuts, int64_t num_shards);

// How the subtrees of all ranks, in rank order, become the whole sum: merges after each, attributes
// of TreeSum. `ranks`: the cuts of every data rank.
std::vector<int64_t> tree_sum_merges(const std::vector<std::vector<MicroBatchCut>>& ranks,
                                     int64_t num_shards);

}  // namespace trainrt
