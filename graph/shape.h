// Concrete tensor shapes and the arithmetic on them. Symbolic dims are bound before a Graph exists
// (graph/onnx_import), so every dim here is a number >= 0; a scalar has no dims.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trainrt {

using Shape = std::vector<int64_t>;
using Shapes = std::vector<Shape>;

// Product of the dims; 1 for a scalar. Throws kInvalidModel on a negative dim and beyond 2^48.
int64_t num_elements(const Shape& shape);

// Product of dims [begin, end).
int64_t dims_product(const Shape& shape, int begin, int end);

// Row-major strides, in elements.
Shape row_major_strides(const Shape& shape);

// ONNX's (NumPy's) multidirectional broadcasting. Throws kInvalidModel when the shapes disagree.
Shape broadcast_shapes(const Shape& a, const Shape& b);

// Strides with which a tensor of `shape` is read when broadcast to `target`: 0 on repeated dims.
Shape broadcast_strides(const Shape& shape, const Shape& target);

// Maps a possibly negative axis to [0, ndim). Throws kInvalidModel when out of range.
int normalize_axis(int64_t axis, int ndim);

std::string shape_string(const Shape& shape);  // "[2, 3]"

}  // namespace trainrt
