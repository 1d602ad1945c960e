// Indices and lengths that come with the data: kernels on the CPU refuse those that do not fit, as
// errors of the data (kInvalidArgument). A device cannot refuse in the middle of a step (see
// ops/indexing.cu).
#pragma once

#include "graph/kernel.h"

namespace trainrt {

// `index`, element `position` of an input, names one of `size` places, from the end if negative.
inline void require_index(const KernelContext& context,
                          int64_t index,
                          int64_t position,
                          int64_t size) {
  TRAINRT_REQUIRE(index >= -size && index < size,
                  kInvalidArgument,
                  "node '",
                  context.node().name,
                  "' (",
                  context.node().op_type,
                  "): index ",
                  index,
                  " at position ",
                  position,
                  " is outside of an axis of size ",
                  size);
}

// Input `input` holds one length per sample, each of at most `steps`.
template <typename T>
void require_lengths(const KernelContext& context, int input, int64_t steps) {
  const T* lengths = context.input<T>(input);
  for (int64_t i = 0; lengths != nullptr && i < num_elements(context.input_shape(input)); ++i) {
    TRAINRT_REQUIRE(lengths[i] >= 0 && lengths[i] <= steps,
                    kInvalidArgument,
                    "node '",
                    context.node().name,
                    "' (",
                    context.node().op_type,
                    "): length ",
                    lengths[i],
                    " of sample ",
                    i,
                    " of the batch; wanted 0 to ",
                    steps);
  }
}

}  // namespace trainrt
