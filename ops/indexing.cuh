// How operators that are given indices find the places which these name, on a CUDA device.
#pragma once

#include "ops/broadcast.h"
#include "ops/launch.cuh"

namespace trainrt::indexing {

struct Indices {
  const void* data;
  bool wide;
  TRAINRT_HOST_DEVICE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i]
                : static_cast<int64_t>(static_cast<const int32_t*>(data)[i]);
  }
};

inline Indices indices_of(const KernelContext& context, int input) {
  return {context.raw_input(input), context.input_dtype(input) == DType::kInt64};
}

// A tensor around the gathered axis, of which this shard holds rows [offset, offset + rows).
struct RowView {
  int64_t rows, inner, whole, offset;
  // The row of this shard; -1: another shard's; -2: nobody's.
  TRAINRT_HOST_DEVICE int64_t row(int64_t index) const {
    if (index < -whole || index >= whole) {
      return -2;
    }
    const int64_t at = index + (index < 0 ? whole : 0) - offset;
    return at >= 0 && at < rows ? at : -1;
  }
};

inline RowView row_view(const KernelContext& context, const Shape& shape) {
  const Attributes& attributes = context.attributes();
  const int ndim = static_cast<int>(shape.size());
  const int axis = normalize_axis(attributes.get_int("axis", 0), ndim);
  const int64_t rows = shape[static_cast<size_t>(axis)];
  return {rows,
          dims_product(shape, axis + 1, ndim),
          attributes.get_int("vocab_size", rows),
          attributes.get_int("vocab_offset", 0)};
}

// An element of `indices` names a place along the axis of the line of `data` that it lies in.
struct LineWalk {
  int ndim, axis;
  int64_t dims[kMaxDims];  // of indices
  int64_t data_strides[kMaxDims];
  int64_t size;  // of the axis

  // Of element i, in data: where the axis's position is 0.
  TRAINRT_HOST_DEVICE int64_t line_offset(int64_t i) const {
    int64_t offset = 0;
    for (int d = ndim - 1; d >= 0; --d) {
      offset += d == axis ? 0 : i % dims[d] * data_strides[d];
      i /= dims[d];
    }
    return offset;
  }
  // Offset in data of the place that element i names by `index`; -1: it is outside.
  TRAINRT_HOST_DEVICE int64_t offset(int64_t i, int64_t index) const {
    const int64_t at = index < 0 ? index + size : index;
    return at >= 0 && at < size ? line_offset(i) + at * data_strides[axis] : -1;
  }
};

inline LineWalk line_walk(const KernelContext& context) {
  const Shape& data = context.input_shape(0);
  const Shape& indices = context.input_shape(1);
  TRAINRT_REQUIRE(data.size() <= kMaxDims, kUnsupported, context.node().name, ": too many dims");
  LineWalk walk{};
  walk.ndim = static_cast<int>(data.size());
  walk.axis = normalize_axis(context.attributes().get_int("axis", 0), walk.ndim);
  const Shape data_strides = row_major_strides(data);
  for (size_t d = 0; d < data.size(); ++d) {
    walk.dims[d] = indices[d];
    walk.data_strides[d] = data_strides[d];
  }
  walk.size = data[static_cast<size_t>(walk.axis)];
  return walk;
}

// A tuple of coordinates names a slice of `data`.
struct Addressing {
  int64_t dims[kMaxDims];  // those that coordinates index
  int64_t width, tuples, slice, batch_slices;
  // Number of the slice of tuple t; -1: outside.
  TRAINRT_HOST_DEVICE int64_t place(const int64_t* indices, int64_t t) const {
    int64_t at = 0;
    for (int64_t c = 0; c < width; ++c) {
      int64_t index = indices[t * width + c];
      index += index < 0 ? dims[c] : 0;
      if (index < 0 || index >= dims[c]) {
        return -1;
      }
      at = at * dims[c] + index;
    }
    return t / tuples * batch_slices + at;
  }
};

inline Addressing addressing_of(const KernelContext& context, int batch_dims) {
  const Shape& data = context.input_shape(0);
  const Shape& indices = context.input_shape(1);
  const int ndim = static_cast<int>(data.size());
  TRAINRT_REQUIRE(data.size() <= kMaxDims, kUnsupported, context.node().name, ": too many dims");
  Addressing a{};
  a.width = indices.back();
  const int first = batch_dims + static_cast<int>(a.width);
  for (int d = batch_dims; d < first; ++d) {
    a.dims[d - batch_dims] = data[static_cast<size_t>(d)];
  }
  a.tuples = dims_product(indices, batch_dims, static_cast<int>(indices.size()) - 1);
  a.slice = dims_product(data, first, ndim);
  a.batch_slices = dims_product(data, batch_dims, first);
  return a;
}

}  // namespace trainrt::indexing
