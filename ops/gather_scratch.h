// Workspace of GatherGrad's CUDA kernel: sorted positions, [begin, end) of each row among them, and
// the sums of segments. A function of the shapes, so that a plan knows it.
#pragma once

#include "ops/device_sort.h"
#include "ops/reduce_segments.h"

namespace trainrt {

struct GatherGradScratch {
  int64_t rows, outputs, num_indices;
  int64_t segments;  // of each row's positions; one row may be named by all

  GatherGradScratch(int64_t num_rows, int64_t num_outputs, int64_t indices)
      : rows(num_rows),
        outputs(num_outputs),
        num_indices(indices),
        segments(reduce::device_segments(num_outputs, indices, true)) {}

  int64_t runs_at() const { return device_sort::bytes(num_indices); }
  int64_t partial_at() const { return runs_at() + device_sort::piece_bytes(2 * rows); }
  int64_t bytes() const {
    return partial_at() + (segments > 1 ? segments * outputs * int64_t{sizeof(double)} : 0);
  }
};

}  // namespace trainrt
