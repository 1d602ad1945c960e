// Gradients under --reduction exact: a data rank keeps the sums of several subtrees of logical
// shards apart, and all ranks exchange them in the stead of one sum each (parallel/reduction_tree).
#pragma once

#include <cstdint>

namespace trainrt {

struct ExactSums {
  int held = 1;       // at once, by the data rank that holds most
  int own = 0;        // that it gives to the others at the end of the step
  int exchanged = 0;  // of all data ranks together; 0: the reduction is a fast one
};

// With even shares of a batch in micro-batches of a size.
ExactSums exact_sums(int64_t global_batch,
                     int data_parallel,
                     int64_t micro_batch,
                     int64_t logical_shards);

}  // namespace trainrt
