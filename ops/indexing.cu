// CUDA kernels of Gather, GatherElements and GatherND; ops/scatter.cu has what adds or writes to
// such places.
//
// A device cannot refuse an index that lies outside of its axis in the middle of a step: what it
// would read is NaN instead (0 for integers), so that the loss shows it, and what it would write is
// left out.
#include <limits>

#include "ops/elementwise.cuh"
#include "ops/indexing.cuh"

namespace trainrt {

namespace {

using indexing::Addressing;
using indexing::Indices;
using indexing::LineWalk;
using indexing::RowView;

template <typename T>
TRAINRT_HOST_DEVICE T outside() {
  if constexpr (std::is_integral_v<T>) {
    return T(0);
  } else {
    return to_storage<T>(std::numeric_limits<double>::quiet_NaN());
  }
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
  const RowView view = indexing::row_view(context, context.input_shape(0));
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           GatherRows<T>{view,
                         indexing::indices_of(context, 1),
                         num_elements(context.input_shape(1)),
                         context.input<T>(0),
                         context.output<T>(0)});
  });
}

// ---- elements along an axis ------------------------------------------------------------------

template <typename T>
struct GatherElement {
  LineWalk walk;
  Indices indices;
  const T* data;
  T* out;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t offset = walk.offset(i, indices[i]);
    out[i] = offset < 0 ? outside<T>() : data[offset];
  }
};

void gather_elements_cuda(KernelContext& context) {
  const LineWalk walk = indexing::line_walk(context);
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.input_shape(1)),
           GatherElement<T>{
               walk, indexing::indices_of(context, 1), context.input<T>(0), context.output<T>(0)});
  });
}

// ---- tuples of coordinates -------------------------------------------------------------------

template <typename T>
struct GatherSlices {
  Addressing addressing;
  const int64_t* indices;
  const T* data;
  T* out;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t place = addressing.place(indices, i / addressing.slice);
    out[i] = place < 0 ? outside<T>() : data[place * addressing.slice + i % addressing.slice];
  }
};

void gather_nd_cuda(KernelContext& context) {
  const Addressing addressing = indexing::addressing_of(
      context, static_cast<int>(context.attributes().get_int("batch_dims", 0)));
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           GatherSlices<T>{
               addressing, context.input<int64_t>(1), context.input<T>(0), context.output<T>(0)});
  });
}

const RegisterCudaKernel kGather{"Gather", gather_cuda};
const RegisterCudaKernel kGatherElements{"GatherElements", gather_elements_cuda};
const RegisterCudaKernel kGatherND{"GatherND", gather_nd_cuda};

}  // namespace

}  // namespace trainrt
