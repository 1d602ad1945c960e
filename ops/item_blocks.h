// Sums over the items of a loss or a count, in fixed blocks.
#pragma once

#include <algorithm>

#include "graph/op_def.h"

namespace trainrt {

// Items are summed in blocks of this many, and the blocks in order: the sum depends on the number
// of items alone, not on threads.
inline constexpr int64_t kItemGrain = 4096;

inline double sum_blocks(const double* blocks, int64_t num_items) {
  double sum = 0;
  for (int64_t block = 0; block * kItemGrain < num_items; ++block) {
    sum += blocks[block];
  }
  return sum;
}

// Workspace for one double per block of the items of input `items_input`.
inline int64_t item_workspace(const OpContext& op, int items_input) {
  const int64_t items = op.num_elements(items_input);
  return std::max<int64_t>(1, (items + kItemGrain - 1) / kItemGrain) *
         static_cast<int64_t>(sizeof(double));
}

// The same for operators that use it on CUDA alone.
inline int64_t device_item_workspace(const OpContext& op, const DeviceSpec& spec, int items_input) {
  return spec.backend == Backend::kCuda ? item_workspace(op, items_input) : 0;
}

}  // namespace trainrt
