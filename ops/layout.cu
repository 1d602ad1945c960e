// CUDA kernels that move elements between strided views of memory: Transpose, Expand, Concat,
// Split, Slice and its gradient, Pad; and plain copies.
#include <array>
#include <limits>
#include <vector>

#include "graph/convert_number.h"
#include "ops/broadcast.h"
#include "ops/elementwise.cuh"
#include "ops/launch.cuh"
#include "ops/pad.h"
#include "ops/slice.h"
#include "ops/strided_copy.cuh"

namespace trainrt {

namespace {

struct alignas(16) Word128 {
  uint64_t halves[2];
};

// Index holds any number below the count of words: dividing takes long in 64 bits.
template <typename Word, typename Index>
struct StridedCopy {
  const Word* from;
  Word* to;
  int ndim;
  Index dims[kMaxDims];
  int64_t from_strides[kMaxDims];
  int64_t to_strides[kMaxDims];
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    int64_t source = 0, target = 0;
    Index rest = static_cast<Index>(i);
    for (int d = ndim - 1; d > 0; --d) {
      const Index next = rest / dims[d];
      const int64_t index = static_cast<int64_t>(rest - next * dims[d]);
      rest = next;
      source += index * from_strides[d];
      target += index * to_strides[d];
    }
    source += static_cast<int64_t>(rest) * from_strides[0];
    target += static_cast<int64_t>(rest) * to_strides[0];
    to[target] = from[source];
  }
};

// Bytes of the largest word in which both views can be copied: runs along the innermost dim are
// whole words, which begin at their multiples.
int64_t word_bytes(const BroadcastLoops& loops, int64_t element_bytes, const void* from, void* to) {
  if (loops.inner_stride(0) != 1 || loops.inner_stride(1) != 1) {
    return element_bytes;
  }
  int64_t common = 16 | loops.inner() * element_bytes | reinterpret_cast<intptr_t>(from) |
                   reinterpret_cast<intptr_t>(to);
  for (size_t d = 0; d + 1 < static_cast<size_t>(loops.ndim); ++d) {
    common |= (loops.strides[0][d] | loops.strides[1][d]) * element_bytes;
  }
  return common & -common;
}

template <typename Word, typename Index>
void launch_copy(KernelContext& context,
                 const BroadcastLoops& loops,
                 int64_t elements_per_word,
                 const void* from,
                 void* to) {
  StridedCopy<Word, Index> copy{
      static_cast<const Word*>(from), static_cast<Word*>(to), loops.ndim, {}, {}, {}};
  int64_t words = 1;
  for (size_t d = 0; d < static_cast<size_t>(loops.ndim); ++d) {
    const bool inner = d + 1 == static_cast<size_t>(loops.ndim);
    const int64_t dim = inner ? loops.dims[d] / elements_per_word : loops.dims[d];
    copy.dims[d] = static_cast<Index>(dim);
    copy.to_strides[d] = inner ? loops.strides[0][d] : loops.strides[0][d] / elements_per_word;
    copy.from_strides[d] = inner ? loops.strides[1][d] : loops.strides[1][d] / elements_per_word;
    words *= dim;
  }
  launch(context, words, copy);
}

}  // namespace

void copy_views(KernelContext& context,
                DType dtype,
                const Shape& dims,
                const StridedView& to,
                const StridedView& from) {
  const std::array<Shape, 2> strides = {to.strides, from.strides};
  const BroadcastLoops loops = merge_loops(dims, strides);
  const int64_t bytes = word_bytes(loops, dtype_bytes(dtype), from.base, to.base);
  const auto run = [&]<typename Word>(Word) {
    const int64_t per_word = static_cast<int64_t>(sizeof(Word)) / dtype_bytes(dtype);
    if (num_elements(dims) <= std::numeric_limits<uint32_t>::max()) {
      launch_copy<Word, uint32_t>(context, loops, per_word, from.base, to.base);
    } else {
      launch_copy<Word, uint64_t>(context, loops, per_word, from.base, to.base);
    }
  };
  switch (bytes) {
    case 1:
      return run(uint8_t{});
    case 2:
      return run(uint16_t{});
    case 4:
      return run(uint32_t{});
    case 8:
      return run(uint64_t{});
    default:
      return run(Word128{});
  }
}

namespace {

void transpose_cuda(KernelContext& context) {
  const Shape& out = context.output_shape(0);
  const Shape in_strides = row_major_strides(context.input_shape(0));
  Shape strides;
  for (const int64_t axis : context.attributes().get_ints("perm")) {
    strides.push_back(in_strides[static_cast<size_t>(axis)]);
  }
  copy_views(context,
             context.output_dtype(0),
             out,
             {context.raw_output(0), row_major_strides(out)},
             {context.raw_input(0), strides});
}

void expand_cuda(KernelContext& context) {
  const Shape& out = context.output_shape(0);
  copy_views(context,
             context.output_dtype(0),
             out,
             {context.raw_output(0), row_major_strides(out)},
             {context.raw_input(0), broadcast_strides(context.input_shape(0), out)});
}

// The part of a whole tensor that begins at `offset` of dim `axis`.
StridedView part_of(void* whole, const Shape& shape, int axis, int64_t offset, DType dtype) {
  const Shape strides = row_major_strides(shape);
  return {element_at(whole, offset * strides[static_cast<size_t>(axis)], dtype_bytes(dtype)),
          strides};
}

void concat_cuda(KernelContext& context) {
  const Shape& out = context.output_shape(0);
  const int axis =
      normalize_axis(context.attributes().get_int("axis"), static_cast<int>(out.size()));
  int64_t offset = 0;
  for (int i = 0; i < context.num_inputs(); ++i) {
    const Shape& dims = context.input_shape(i);
    copy_views(context,
               context.output_dtype(0),
               dims,
               part_of(context.raw_output(0), out, axis, offset, context.output_dtype(0)),
               {context.raw_input(i), row_major_strides(dims)});
    offset += dims[static_cast<size_t>(axis)];
  }
}

void split_cuda(KernelContext& context) {
  const Shape& in = context.input_shape(0);
  const int axis =
      normalize_axis(context.attributes().get_int("axis"), static_cast<int>(in.size()));
  const std::vector<int64_t>& sizes = context.attributes().get_ints("split");
  int64_t offset = 0;
  for (int i = 0; i < context.num_outputs(); ++i) {
    if (context.has_output(i)) {
      const Shape& dims = context.output_shape(i);
      copy_views(context,
                 context.input_dtype(0),
                 dims,
                 {context.raw_output(i), row_major_strides(dims)},
                 part_of(context.raw_input(0), in, axis, offset, context.input_dtype(0)));
    }
    offset += sizes[static_cast<size_t>(i)];
  }
}

void slice_cuda(KernelContext& context) {
  const Shape& out = context.output_shape(0);
  copy_views(context,
             context.output_dtype(0),
             out,
             {context.raw_output(0), row_major_strides(out)},
             view_of_slice(context.attributes(),
                           context.input_shape(0),
                           context.raw_input(0),
                           dtype_bytes(context.output_dtype(0))));
}

void slice_grad_cuda(KernelContext& context) {
  const Shape& dy = context.input_shape(0);
  TRAINRT_CUDA_CHECK(cudaMemsetAsync(context.raw_output(0),
                                     0,
                                     static_cast<size_t>(context.output_type(0).bytes()),
                                     cuda_context(context).cuda_stream()));
  copy_views(context,
             context.output_dtype(0),
             dy,
             view_of_slice(context.attributes(),
                           context.output_shape(0),
                           context.raw_output(0),
                           dtype_bytes(context.output_dtype(0))),
             {context.raw_input(0), row_major_strides(dy)});
}

template <int kInput>
void copy_cuda(KernelContext& context) {
  if (context.raw_input(kInput) != context.raw_output(0)) {
    TRAINRT_CUDA_CHECK(cudaMemcpyAsync(context.raw_output(0),
                                       context.raw_input(kInput),
                                       static_cast<size_t>(context.output_type(0).bytes()),
                                       cudaMemcpyDeviceToDevice,
                                       cuda_context(context).cuda_stream()));
  }
}

// ---- padding ---------------------------------------------------------------------------------

// How the dims of a padded tensor map to those of the tensor inside.
struct PadDims {
  int ndim;
  PadMode mode;
  int64_t outer[kMaxDims], inner[kMaxDims], pads[kMaxDims];

  // Where element i of the padded tensor comes from; -1: the constant.
  TRAINRT_HOST_DEVICE int64_t source(int64_t i) const {
    int64_t offset = 0, stride = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      const int64_t from = pad_source(i % outer[d], pads[d], inner[d], mode);
      i /= outer[d];
      if (from < 0) {
        return -1;
      }
      offset += from * stride;
      stride *= inner[d];
    }
    return offset;
  }
};

PadDims pad_dims(const KernelContext& context, const Shape& inner, const Shape& outer) {
  TRAINRT_REQUIRE(outer.size() <= kMaxDims, kUnsupported, "Pad of ", outer.size(), " dims");
  PadDims dims{static_cast<int>(outer.size()), pad_mode_of(context.attributes()), {}, {}, {}};
  const std::vector<int64_t>& pads = context.attributes().get_ints("pads");
  for (size_t d = 0; d < outer.size(); ++d) {
    dims.outer[d] = outer[d];
    dims.inner[d] = inner[d];
    dims.pads[d] = pads[d];
  }
  return dims;
}

template <typename Word>
struct PadMove {
  PadDims dims;
  const Word* in;
  Word* out;
  Word value;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t from = dims.source(i);
    out[i] = from < 0 ? value : in[from];
  }
};

void pad_cuda(KernelContext& context) {
  const PadDims dims = pad_dims(context, context.input_shape(0), context.output_shape(0));
  const double number = context.attributes().get_float("value", 0);
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           PadMove<T>{dims, context.input<T>(0), context.output<T>(0), convert_number<T>(number)});
  });
}

// dx[j] = sum of dy[i] over the places i that j went to. One thread per j walks the product of the
// few places along each dim, so no two threads meet.
template <typename T>
struct PadGradient {
  PadDims dims;
  const T* dy;
  T* dx;
  // The first place from `i` on along dim d that comes from `target`; outer[d] when there is none.
  TRAINRT_HOST_DEVICE int64_t place(int d, int64_t i, int64_t target) const {
    const int64_t outer = dims.outer[d];
    if (outer == dims.inner[d] && dims.pads[d] == 0) {
      return i <= target ? target : outer;
    }
    const int64_t next = next_pad_place(i, target, dims.pads[d], dims.inner[d], dims.mode);
    return next < outer ? next : outer;
  }
  TRAINRT_HOST_DEVICE void operator()(int64_t j) const {
    int64_t target[kMaxDims], first[kMaxDims], at[kMaxDims];
    int64_t rest = j;
    bool any = true;
    for (int d = dims.ndim - 1; d >= 0; --d) {
      target[d] = rest % dims.inner[d];
      rest /= dims.inner[d];
      first[d] = at[d] = place(d, 0, target[d]);
      any = any && at[d] < dims.outer[d];
    }
    ComputeOf<T> sum = 0;
    while (any) {
      int64_t offset = 0;
      for (int d = 0; d < dims.ndim; ++d) {
        offset = offset * dims.outer[d] + at[d];
      }
      sum += to_compute<ComputeOf<T>>(dy[offset]);
      int d = dims.ndim - 1;
      for (; d >= 0; --d) {
        at[d] = place(d, at[d] + 1, target[d]);
        if (at[d] < dims.outer[d]) {
          break;
        }
        at[d] = first[d];
      }
      any = d >= 0;
    }
    dx[j] = to_storage<T>(sum);
  }
};

void pad_grad_cuda(KernelContext& context) {
  const PadDims dims = pad_dims(context, context.output_shape(0), context.input_shape(0));
  dispatch_stored(context.node(), context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           PadGradient<T>{dims, context.input<T>(0), context.output<T>(0)});
  });
}

const RegisterCudaKernel kTranspose{"Transpose", transpose_cuda};
const RegisterCudaKernel kExpand{"Expand", expand_cuda};
const RegisterCudaKernel kConcat{"Concat", concat_cuda};
const RegisterCudaKernel kSplit{"Split", split_cuda};
const RegisterCudaKernel kSlice{"Slice", slice_cuda};
const RegisterCudaKernel kSliceGrad{"SliceGrad", slice_grad_cuda};
const RegisterCudaKernel kReshape{"Reshape", copy_cuda<0>};
const RegisterCudaKernel kIdentity{"Identity", copy_cuda<0>};
const RegisterCudaKernel kAssign{"Assign", copy_cuda<1>};
const RegisterCudaKernel kPad{"Pad", pad_cuda};
const RegisterCudaKernel kPadGrad{"PadGrad", pad_grad_cuda};

}  // namespace

}  // namespace trainrt
