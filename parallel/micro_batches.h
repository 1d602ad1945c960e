// The arithmetic of cutting a step's samples: over data ranks, and into micro-batches.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/plan.h"

namespace trainrt {

// Cuts `global_batch` samples over `degree` data ranks. Without `shares` evenly. With `shares`: as
// samples when they add up to global_batch, else in proportion. With a micro_batch_size > 0 shares
// round to whole micro-batches by largest remainder, ties to the later rank; with 0 each rank runs
// its share as one micro-batch.
std::vector<DataShare> make_shares(int64_t global_batch,
                                   int degree,
                                   int64_t micro_batch_size,
                                   const std::vector<double>& shares);

// The same where data ranks have micro-batch sizes of their own: shares are whole samples, each cut
// into micro-batches of the rank's size.
std::vector<DataShare> make_sized_shares(int64_t global_batch,
                                         const std::vector<int64_t>& micro_batch_sizes,
                                         const std::vector<double>& shares);

// The same for --reduction exact, where shares are whole logical shards, and a micro-batch lies
// within one; with a micro_batch_size of 0 it is one.
std::vector<DataShare> make_exact_shares(int64_t global_batch,
                                         int degree,
                                         int64_t micro_batch_size,
                                         const std::vector<double>& shares,
                                         int64_t logical_shards);

// Logical shards of a step that hold samples: 1 unless the reduction is exact.
int64_t num_shards(const Plan& plan);

// Samples of the step, as indices into the global batch.
struct MicroBatchCut {
  int64_t first_sample = 0;
  int64_t num_samples = 0;
  int64_t shard = 0;
};

// The micro-batches of one data rank, in order. Throws kInvalidArgument when the rank's share
// contradicts itself or cuts a logical shard.
std::vector<MicroBatchCut> cut_micro_batches(const Plan& plan, int data_rank);

// Fills in num_micro_batches where it is negative, and checks it where it is not: kInvalidArgument.
void count_micro_batches(Plan& plan);

}  // namespace trainrt
