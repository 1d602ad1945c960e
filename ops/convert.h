// Conversion between element types, block by block: what Cast does, and how kernels that compute in
// another type than the tensor's read and write it.
#pragma once

#include <cstdint>

#include "graph/dtype.h"

namespace trainrt {

// to[i] = from[i] for i < n, by C++ rules through float for the 16-bit floats; non-zero is true.
// `from` and `to` must not overlap.
void convert_elements(DType from_dtype, const void* from, DType to_dtype, void* to, int64_t n);

}  // namespace trainrt
