// ops/strided_copy.h on a CUDA device.
#pragma once

#include "graph/kernel.h"
#include "ops/strided_copy.h"

namespace trainrt {

// to[i] = from[i] for every i in a box of shape `dims`. The destination's elements must be distinct
// and the two must not overlap.
void copy_views(KernelContext& context,
                DType dtype,
                const Shape& dims,
                const StridedView& to,
                const StridedView& from);

}  // namespace trainrt
