// Where a slice lies in memory, for the kernels of both devices.
#pragma once

#include "graph/attribute.h"
#include "ops/strided_copy.h"

namespace trainrt {

// The slice as a strided view of the whole tensor.
inline StridedView view_of_slice(const Attributes& attributes,
                                 const Shape& whole,
                                 void* base,
                                 int64_t bytes) {
  const std::vector<int64_t>& axes = attributes.get_ints("axes");
  const std::vector<int64_t>& starts = attributes.get_ints("starts");
  const std::vector<int64_t>& steps = attributes.get_ints("steps");
  Shape strides = row_major_strides(whole);
  int64_t offset = 0;
  for (size_t i = 0; i < axes.size(); ++i) {
    const size_t axis = static_cast<size_t>(axes[i]);
    offset += starts[i] * strides[axis];
    strides[axis] *= steps[i];
  }
  return {element_at(base, offset, bytes), strides};
}

}  // namespace trainrt
