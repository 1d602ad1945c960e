// Which sample is the p-th of the training run: a pure function, so that a resumed run, another
// split over ranks and a prefetching thread agree without passing state around.
#pragma once

#include <cstdint>

namespace trainrt {

// A permutation of [0, n) chosen by (seed, epoch), evaluated at `index`. O(1) memory and expected
// time.
int64_t shuffled_index(uint64_t seed, int64_t epoch, int64_t n, int64_t index);

// Samples of the step that starts at global sample count `position`: `batch`, or what is left of
// the epoch of `n` samples.
int64_t samples_at(int64_t position, int64_t batch, int64_t n);

}  // namespace trainrt
