// CUDA kernels of Gather, GatherElements, GatherND and their gradients.
//
// A device cannot refuse an index that lies outside of its axis in the middle of a step: what it
// would read is NaN instead (0 for integers), so that the loss shows it, and what it would write is
// left out. Additions are made by one thread per place, in order of index, so that the bits do not
// depend on chance.
#include <limits>

#include "ops/broadcast.h"
#include "ops/elementwise.cuh"
#include "ops/launch.cuh"

namespace trainrt {

namespace {

struct Indices {
  const void* data;
  bool wide;
  TRAINRT_HOST_DEVICE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i]
                : static_cast<int64_t>(static_cast<const int32_t*>(data)[i]);
  }
};

Indices indices_of(const KernelContext& context, int input) {
  return {context.raw_input(input), context.input_dtype(input) == DType::kInt64};
}

template <typename T>
TRAINRT_HOST_DEVICE T outside() {
  if constexpr (std::is_integral_v<T>) {
    return T(0);
  } else {
    return to_storage<T>(std::numeric_limits<double>::quiet_NaN());
  }
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

RowView row_view(const KernelContext& context, const Shape& shape) {
  const Attributes& attributes = context.attributes();
  const int ndim = static_cast<int>(shape.size());
  const int axis = normalize_axis(attributes.get_int("axis", 0), ndim);
  const int64_t rows = shape[static_cast<size_t>(axis)];
  return {rows,
          dims_product(shape, axis + 1, ndim),
          attributes.get_int("vocab_size", rows),
          attributes.get_int("vocab_offset", 0)};
}

template <typename T>
struct GatherRows {
  RowView view;
  Indices indices;
  int64_t num_indices;
  const T* data;
  T* out;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t line = i / view.inner;
    const int64_t row = view.row(indices[line % num_indices]);
    out[i] = row == -1 ? to_storage<T>(0.0)
             : row == -2
                 ? outside<T>()
                 : data[(line / num_indices * view.rows + row) * view.inner + i % view.inner];
  }
};

void gather_cuda(KernelContext& context) {
  const RowView view = row_view(context, context.input_shape(0));
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           GatherRows<T>{view,
                         indices_of(context, 1),
                         num_elements(context.input_shape(1)),
                         context.input<T>(0),
                         context.output<T>(0)});
  });
}

// The workspace holds lists: head[row] is the first position of the row's index (kNoPosition:
// there is none), next[i] that after position i. As on the CPU they are ascending, so every row is
// summed in order of position.
constexpr int32_t kNoPosition = 0x7f7f7f7f;  // every byte alike: memset writes it

struct LinkPositions {
  RowView view;
  Indices indices;
  int64_t num_indices;
  int32_t* next;
  // One thread per position looks for the following one of the same row.
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t row = view.row(indices[i]);
    int64_t at = i + 1;
    while (at < num_indices && view.row(indices[at]) != row) {
      ++at;
    }
    next[i] = at < num_indices ? static_cast<int32_t>(at) : kNoPosition;
  }
};

struct FindHeads {
  RowView view;
  Indices indices;
  int32_t* head;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t row = view.row(indices[i]);
    if (row >= 0) {
      atomic_min(head + row, static_cast<int32_t>(i));  // the same whatever the order
    }
  }
};

template <typename T>
struct SumRows {
  RowView view;
  int64_t num_indices;
  const int32_t *head, *next;
  const T* dy;
  T* dx;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t line = i / view.inner, column = i % view.inner;
    ComputeOf<T> sum = 0;
    for (int32_t k = head[line % view.rows]; k != kNoPosition; k = next[k]) {
      sum +=
          to_compute<ComputeOf<T>>(dy[(line / view.rows * num_indices + k) * view.inner + column]);
    }
    dx[i] = to_storage<T>(sum);
  }
};

void gather_grad_cuda(KernelContext& context) {
  const RowView view = row_view(context, context.output_shape(0));
  const Indices indices = indices_of(context, 0);
  const int64_t num_indices = num_elements(context.input_shape(0));
  TRAINRT_REQUIRE(num_indices < kNoPosition,
                  kUnsupported,
                  "node '",
                  context.node().name,
                  "' (",
                  context.node().op_type,
                  "): ",
                  num_indices,
                  " indices; CUDA takes fewer than ",
                  kNoPosition,
                  ". Use a smaller --micro-batch-size");
  int32_t* head = reinterpret_cast<int32_t*>(context.workspace().data());
  int32_t* next = head + view.rows;
  launch(context, num_indices, LinkPositions{view, indices, num_indices, next});
  TRAINRT_CUDA_CHECK(cudaMemsetAsync(head,
                                     kNoPosition & 0xff,
                                     static_cast<size_t>(view.rows) * sizeof(int32_t),
                                     cuda_context(context).cuda_stream()));
  launch(context, num_indices, FindHeads{view, indices, head});
  dispatch_stored(context.node(), context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           SumRows<T>{view, num_indices, head, next, context.input<T>(1), context.output<T>(0)});
  });
}

// ---- elements along an axis ------------------------------------------------------------------

// Lines of `indices` along the axis, and the matching lines of `data`.
struct LineWalk {
  int ndim, axis;
  int64_t dims[kMaxDims];  // of indices
  int64_t data_strides[kMaxDims], index_strides[kMaxDims];
  int64_t length, size;  // of a line of indices, of data

  TRAINRT_HOST_DEVICE void locate(int64_t line, int64_t& index_offset, int64_t& data_offset) const {
    index_offset = data_offset = 0;
    for (int d = ndim - 1; d >= 0; --d) {
      if (d != axis) {
        index_offset += line % dims[d] * index_strides[d];
        data_offset += line % dims[d] * data_strides[d];
        line /= dims[d];
      }
    }
  }
  // -1: outside.
  TRAINRT_HOST_DEVICE int64_t position(int64_t index) const {
    const int64_t at = index < 0 ? index + size : index;
    return at >= 0 && at < size ? at : -1;
  }
};

LineWalk line_walk(const KernelContext& context) {
  const Shape& data = context.input_shape(0);
  const Shape& indices = context.input_shape(1);
  TRAINRT_REQUIRE(data.size() <= kMaxDims, kUnsupported, context.node().name, ": too many dims");
  LineWalk walk{};
  walk.ndim = static_cast<int>(data.size());
  walk.axis = normalize_axis(context.attributes().get_int("axis", 0), walk.ndim);
  const Shape data_strides = row_major_strides(data), index_strides = row_major_strides(indices);
  for (size_t d = 0; d < data.size(); ++d) {
    walk.dims[d] = indices[d];
    walk.data_strides[d] = data_strides[d];
    walk.index_strides[d] = index_strides[d];
  }
  walk.length = indices[static_cast<size_t>(walk.axis)];
  walk.size = data[static_cast<size_t>(walk.axis)];
  return walk;
}

template <typename T>
struct GatherLine {
  LineWalk walk;
  Indices indices;
  const T* data;
  T* out;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    int64_t index_offset, data_offset;
    walk.locate(i / walk.length, index_offset, data_offset);
    const int64_t at = index_offset + i % walk.length * walk.index_strides[walk.axis];
    const int64_t position = walk.position(indices[at]);
    out[at] =
        position < 0 ? outside<T>() : data[data_offset + position * walk.data_strides[walk.axis]];
  }
};

enum class Combine : uint8_t { kNone, kAdd, kMul, kMax, kMin };

Combine combine_of(const Attributes& attributes) {
  const std::string name = attributes.get_string("reduction", "none");
  return name == "add"   ? Combine::kAdd
         : name == "mul" ? Combine::kMul
         : name == "max" ? Combine::kMax
         : name == "min" ? Combine::kMin
                         : Combine::kNone;
}

template <typename T>
TRAINRT_HOST_DEVICE T combine(T a, T b, Combine how) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return how == Combine::kNone
               ? b
               : to_storage<T>(combine(to_compute<float>(a), to_compute<float>(b), how));
  } else {
    return how == Combine::kAdd   ? static_cast<T>(a + b)
           : how == Combine::kMul ? static_cast<T>(a * b)
           : how == Combine::kMax ? (b > a ? b : a)
           : how == Combine::kMin ? (b < a ? b : a)
                                  : b;
  }
}

// One thread per line: its updates are applied in order.
template <typename T>
struct ScatterLine {
  LineWalk walk;
  Indices indices;
  const T* updates;
  T* out;
  Combine how;
  TRAINRT_HOST_DEVICE void operator()(int64_t line) const {
    int64_t index_offset, data_offset;
    walk.locate(line, index_offset, data_offset);
    for (int64_t i = 0; i < walk.length; ++i) {
      const int64_t at = index_offset + i * walk.index_strides[walk.axis];
      const int64_t position = walk.position(indices[at]);
      if (position >= 0) {
        T& to = out[data_offset + position * walk.data_strides[walk.axis]];
        to = combine(to, updates[at], how);
      }
    }
  }
};

void copy_data(KernelContext& context) {
  if (context.raw_input(0) != context.raw_output(0)) {
    TRAINRT_CUDA_CHECK(cudaMemcpyAsync(context.raw_output(0),
                                       context.raw_input(0),
                                       static_cast<size_t>(context.output_type(0).bytes()),
                                       cudaMemcpyDeviceToDevice,
                                       cuda_context(context).cuda_stream()));
  }
}

void gather_elements_cuda(KernelContext& context) {
  const LineWalk walk = line_walk(context);
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.input_shape(1)),
           GatherLine<T>{walk, indices_of(context, 1), context.input<T>(0), context.output<T>(0)});
  });
}

void scatter_elements_cuda(KernelContext& context) {
  const LineWalk walk = line_walk(context);
  copy_data(context);
  const int64_t lines = num_elements(context.input_shape(1)) / std::max<int64_t>(1, walk.length);
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           walk.length == 0 ? 0 : lines,
           ScatterLine<T>{walk,
                          indices_of(context, 1),
                          context.input<T>(2),
                          context.output<T>(0),
                          combine_of(context.attributes())});
  });
}

// ---- tuples of coordinates -------------------------------------------------------------------

struct Addressing {
  int64_t dims[kMaxDims];  // those that coordinates index
  int64_t width, tuples, slice, batch_elements;
  // Offset in data of tuple t; -1: outside.
  TRAINRT_HOST_DEVICE int64_t offset(const int64_t* indices, int64_t t) const {
    int64_t at = 0;
    for (int64_t c = 0; c < width; ++c) {
      int64_t index = indices[t * width + c];
      index += index < 0 ? dims[c] : 0;
      if (index < 0 || index >= dims[c]) {
        return -1;
      }
      at = at * dims[c] + index;
    }
    return t / tuples * batch_elements + at * slice;
  }
};

Addressing addressing_of(const KernelContext& context, int batch_dims) {
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
  a.batch_elements = dims_product(data, batch_dims, ndim);
  return a;
}

template <typename T>
struct GatherSlices {
  Addressing addressing;
  const int64_t* indices;
  const T* data;
  T* out;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t offset = addressing.offset(indices, i / addressing.slice);
    out[i] = offset < 0 ? outside<T>() : data[offset + i % addressing.slice];
  }
};

// One thread per column of a slice runs over all tuples in order.
template <typename T>
struct ScatterSlices {
  Addressing addressing;
  const int64_t* indices;
  const T* updates;
  T* out;
  Combine how;
  int64_t total;
  TRAINRT_HOST_DEVICE void operator()(int64_t column) const {
    for (int64_t t = 0; t < total; ++t) {
      const int64_t offset = addressing.offset(indices, t);
      if (offset >= 0) {
        T& to = out[offset + column];
        to = combine(to, updates[t * addressing.slice + column], how);
      }
    }
  }
};

void gather_nd_cuda(KernelContext& context) {
  const Addressing addressing =
      addressing_of(context, static_cast<int>(context.attributes().get_int("batch_dims", 0)));
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           GatherSlices<T>{
               addressing, context.input<int64_t>(1), context.input<T>(0), context.output<T>(0)});
  });
}

void scatter_nd_cuda(KernelContext& context) {
  const Addressing addressing = addressing_of(context, 0);
  copy_data(context);
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           addressing.slice,
           ScatterSlices<T>{addressing,
                            context.input<int64_t>(1),
                            context.input<T>(2),
                            context.output<T>(0),
                            combine_of(context.attributes()),
                            addressing.tuples});
  });
}

const RegisterCudaKernel kGather{"Gather", gather_cuda};
const RegisterCudaKernel kGatherGrad{"GatherGrad", gather_grad_cuda};
const RegisterCudaKernel kGatherElements{"GatherElements", gather_elements_cuda};
const RegisterCudaKernel kScatterElements{"ScatterElements", scatter_elements_cuda};
const RegisterCudaKernel kGatherND{"GatherND", gather_nd_cuda};
const RegisterCudaKernel kScatterND{"ScatterND", scatter_nd_cuda};

}  // namespace

}  // namespace trainrt
