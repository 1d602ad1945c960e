// CUDA kernels that add or write to places which indices name: the gradient of Gather,
// ScatterElements and ScatterND. ops/gather.cc, gather_elements.cc and gather_nd.cc have the
// definitions.
//
// Positions are sorted by their places first. Then one thread per place and column goes through its
// positions in order, so the bits do not depend on chance. What names no place is left out.
#include "ops/device_sort.cuh"
#include "ops/elementwise.cuh"
#include "ops/gather_scratch.h"
#include "ops/indexing.cuh"

namespace trainrt {

namespace {

using device_sort::Sorted;
using indexing::Addressing;
using indexing::Indices;
using indexing::LineWalk;
using indexing::RowView;

// ---- the gradient of Gather --------------------------------------------------------------------

struct PlaceOfRow {
  RowView view;
  Indices indices;
  TRAINRT_HOST_DEVICE int64_t operator()(int64_t i) const {
    const int64_t row = view.row(indices[i]);
    return row >= 0 ? row : view.rows;
  }
};

// [begin, end) of each row among the sorted positions; both are 0 where it has none.
struct FindRuns {
  Sorted sorted;
  int64_t rows;
  int32_t *begin, *end;
  TRAINRT_HOST_DEVICE void operator()(int64_t k) const {
    const int64_t row = sorted.places[k];
    if (row < rows && sorted.begins(k)) {
      begin[row] = static_cast<int32_t>(k);
    }
    if (row < rows && sorted.ends(k)) {
      end[row] = static_cast<int32_t>(k + 1);
    }
  }
};

// One thread per segment of a row's positions and column.
template <typename T>
struct SumRows {
  using C = ComputeOf<T>;
  RowView view;
  int64_t num_indices, segments, outputs;
  const uint32_t* positions;
  const int32_t *begin, *end;
  const T* dy;
  T* dx;
  C* partial;  // [segments][outputs], when there is more than one
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t segment = i / outputs, output = i % outputs;
    const int64_t line = output / view.inner, column = output % view.inner;
    const int64_t row = line % view.rows;
    const int64_t size = (end[row] - begin[row] + segments - 1) / segments;
    const int64_t from = begin[row] + segment * size;
    const int64_t to = from + size < end[row] ? from + size : end[row];
    const T* terms = dy + line / view.rows * num_indices * view.inner + column;
    C sum = 0;
    for (int64_t k = from; k < to; ++k) {
      sum += to_compute<C>(terms[positions[k] * view.inner]);
    }
    if (segments > 1) {
      partial[i] = sum;
    } else {
      dx[output] = to_storage<T>(sum);
    }
  }
};

template <typename T>
struct MergeSegments {
  using C = ComputeOf<T>;
  int64_t segments, outputs;
  const C* partial;
  T* dx;
  TRAINRT_HOST_DEVICE void operator()(int64_t output) const {
    C sum = 0;
    for (int64_t s = 0; s < segments; ++s) {
      sum += partial[s * outputs + output];
    }
    dx[output] = to_storage<T>(sum);
  }
};

void gather_grad_cuda(KernelContext& context) {
  const RowView view = indexing::row_view(context, context.output_shape(0));
  const int64_t n = num_elements(context.input_shape(0));
  const GatherGradScratch scratch(view.rows, num_elements(context.output_shape(0)), n);
  const Sorted sorted = device_sort::sort_by_place(
      context, n, view.rows, PlaceOfRow{view, indexing::indices_of(context, 0)});
  std::byte* workspace = context.workspace().data();
  int32_t* begin = reinterpret_cast<int32_t*>(workspace + scratch.runs_at());
  int32_t* end = begin + view.rows;
  TRAINRT_CUDA_CHECK(cudaMemsetAsync(begin,
                                     0,
                                     2 * static_cast<size_t>(view.rows) * sizeof(int32_t),
                                     cuda_context(context).cuda_stream()));
  launch(context, n, FindRuns{sorted, view.rows, begin, end});
  dispatch_stored(context.node(), context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    ComputeOf<T>* partial = reinterpret_cast<ComputeOf<T>*>(workspace + scratch.partial_at());
    T* dx = context.output<T>(0);
    launch(context,
           scratch.outputs * scratch.segments,
           SumRows<T>{view,
                      n,
                      scratch.segments,
                      scratch.outputs,
                      sorted.positions,
                      begin,
                      end,
                      context.input<T>(1),
                      dx,
                      partial});
    if (scratch.segments > 1) {
      launch(context,
             scratch.outputs,
             MergeSegments<T>{scratch.segments, scratch.outputs, partial, dx});
    }
  });
}

// ---- scattering --------------------------------------------------------------------------------

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

// The positions of place sorted.places[k], if k is its first, applied in order to the elements of a
// slice.
template <typename T>
struct ApplyUpdates {
  Sorted sorted;
  int64_t num_places, slice;
  const T* updates;
  T* out;
  Combine how;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t column = i % slice, place = sorted.places[i / slice];
    int64_t k = i / slice;
    if (place >= num_places || !sorted.begins(k)) {
      return;
    }
    T value = out[place * slice + column];
    do {
      value = combine(value, updates[sorted.positions[k] * slice + column], how);
    } while (!sorted.ends(k++));
    out[place * slice + column] = value;
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

template <typename PlaceOf>
void scatter(KernelContext& context, int64_t n, int64_t slice, const PlaceOf& place_of) {
  copy_data(context);
  const int64_t num_places = num_elements(context.output_shape(0)) / std::max<int64_t>(1, slice);
  const Sorted sorted = device_sort::sort_by_place(context, n, num_places, place_of);
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           n * slice,
           ApplyUpdates<T>{sorted,
                           num_places,
                           slice,
                           context.input<T>(2),
                           context.output<T>(0),
                           combine_of(context.attributes())});
  });
}

struct PlaceOfElement {
  LineWalk walk;
  Indices indices;
  int64_t num_places;
  TRAINRT_HOST_DEVICE int64_t operator()(int64_t i) const {
    const int64_t offset = walk.offset(i, indices[i]);
    return offset < 0 ? num_places : offset;
  }
};

void scatter_elements_cuda(KernelContext& context) {
  scatter(context,
          num_elements(context.input_shape(1)),
          1,
          PlaceOfElement{indexing::line_walk(context),
                         indexing::indices_of(context, 1),
                         num_elements(context.output_shape(0))});
}

struct PlaceOfTuple {
  Addressing addressing;
  const int64_t* indices;
  int64_t num_places;
  TRAINRT_HOST_DEVICE int64_t operator()(int64_t t) const {
    const int64_t at = addressing.place(indices, t);
    return at < 0 ? num_places : at;
  }
};

void scatter_nd_cuda(KernelContext& context) {
  const Addressing addressing = indexing::addressing_of(context, 0);
  scatter(
      context,
      addressing.tuples,
      addressing.slice,
      PlaceOfTuple{addressing,
                   context.input<int64_t>(1),
                   num_elements(context.output_shape(0)) / std::max<int64_t>(1, addressing.slice)});
}

const RegisterCudaKernel kGatherGrad{"GatherGrad", gather_grad_cuda};
const RegisterCudaKernel kScatterElements{"ScatterElements", scatter_elements_cuda};
const RegisterCudaKernel kScatterND{"ScatterND", scatter_nd_cuda};

}  // namespace

}  // namespace trainrt
