// Moving elements between two strided views of memory: what Transpose, Expand, Tile, Slice, Concat,
// Split and their relatives come down to.
#pragma once

#include <cstdint>

#include "graph/kernel.h"
#include "graph/shape.h"

namespace trainrt {

// A view: element (i0, i1, ...) of the copied box lies at base + sum(i_d * strides[d]) elements.
struct StridedView {
  void* base;
  Shape strides;  // may be negative or 0 in a source
};

// to[i] = from[i] for every i in a box of shape `dims`, elements of `element_bytes` (1, 2, 4 or 8).
// The destination's elements must be distinct and the two must not overlap.
void strided_copy(KernelContext& context,
                  int64_t element_bytes,
                  const Shape& dims,
                  const StridedView& to,
                  const StridedView& from);

// Copies input 0 to output 0, which has as many bytes; nothing to do in place.
void copy_kernel(KernelContext& context);

// Sets all bytes of output 0 to zero.
void clear_output(KernelContext& context);

// `base` moved on by `elements`.
inline void* element_at(void* base, int64_t elements, int64_t element_bytes) {
  return static_cast<std::byte*>(base) + elements * element_bytes;
}

}  // namespace trainrt
