// The sum (max, min) of several ranks' buffers, taken element by element in the order given: the
// one reduction of the CPU communicators, so that threads and processes give equal bits.
#pragma once

#include <cstdint>
#include <vector>

#include "graph/dtype.h"
#include "graph/shard_spec.h"

namespace trainrt {

// out[i] = inputs[0][i] op inputs[1][i] op ... over elements [begin, end), written to every pointer
// of `outputs` (which may be the inputs themselves). Sums are taken in the dtype; for the 16-bit
// types in float, rounded once.
void reduce_in_order(const std::vector<const void*>& inputs,
                     const std::vector<void*>& outputs,
                     int64_t begin,
                     int64_t end,
                     DType dtype,
                     ReductionKind reduction);

}  // namespace trainrt
