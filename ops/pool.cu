// CUDA kernels of the pools: one thread per element written, which gathers what it
// needs, so that no two threads meet. ops/pool.cc has the definitions.
//
// Not through cuDNN: what its maximum pool notes for the gradient is of cuDNN's own form, where our
// taps are an output of the graph that both devices agree on, and averages are bound by memory.
#include <algorithm>
#include <limits>

#include "ops/broadcast.h"
#include "ops/elementwise.cuh"
#include "ops/launch.cuh"
#include "ops/pool.h"

namespace trainrt::pool {

namespace {

constexpr int kMaxSpatial = 3;

// ops/pool.h's Pool as a kernel can carry it.
// I: an integer that holds every number of an element; 32-bit divisions take a fraction of the
// time of 64-bit ones.
template <typename I>
struct PoolDims {
  int ndim;
  bool last;  // nhwc
  bool count_include_pad;
  I c, in_size, out_size;
  I in[kMaxSpatial], out[kMaxSpatial];
  I kernel[kMaxSpatial], strides[kMaxSpatial], dilations[kMaxSpatial];
  I pads_begin[kMaxSpatial], pads_end[kMaxSpatial];

  // An element of an image of `size` positions: its plane's offset, its position, and the distance
  // of positions.
  TRAINRT_HOST_DEVICE I step() const { return last ? c : 1; }
  TRAINRT_HOST_DEVICE I position(I i, I size) const { return last ? i / c % size : i % size; }
  TRAINRT_HOST_DEVICE I plane(I i, I size, I other_size) const {
    return last ? i / (c * size) * (c * other_size) + i % c : i / size * other_size;
  }
  TRAINRT_HOST_DEVICE I window_size() const {
    I size = 1;
    for (int d = 0; d < ndim; ++d) {
      size *= kernel[d];
    }
    return size;
  }
  // The position in x of tap t of output position p; -1 outside of x.
  TRAINRT_HOST_DEVICE I tap(I p, I t) const {
    I at = 0, stride = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      const I i = p % out[d] * strides[d] - pads_begin[d] + t % kernel[d] * dilations[d];
      p /= out[d];
      t /= kernel[d];
      if (i < 0 || i >= in[d]) {
        return -1;
      }
      at += i * stride;
      stride *= in[d];
    }
    return at;
  }
  // What an average over the window of output position p divides by.
  TRAINRT_HOST_DEVICE I divisor(I p) const {
    I product = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      const I start = p % out[d] * strides[d] - pads_begin[d];
      p /= out[d];
      // With ceil_mode a window may reach beyond the end padding; those taps never count.
      const I low = count_include_pad ? start : 0;
      const I high = in[d] + (count_include_pad ? pads_end[d] : 0);
      I count = 0;
      for (I t = 0; t < kernel[d]; ++t) {
        const I i = start + t * dilations[d];
        count += i >= low && i < high ? 1 : 0;
      }
      product *= count;
    }
    return product > 0 ? product : 1;
  }
  // Calls fn(p, t) for the output positions p whose window has input position q as tap t, in
  // ascending order.
  template <typename Fn>
  TRAINRT_HOST_DEVICE void for_each_window(I q, const Fn& fn) const {
    const I taps = window_size();
    for (I t = taps - 1; t >= 0; --t) {  // the last tap belongs to the first window
      I p = 0, p_stride = 1, q_rest = q, t_rest = t;
      bool fits = true;
      for (int d = ndim - 1; d >= 0; --d) {
        const I start = q_rest % in[d] + pads_begin[d] - t_rest % kernel[d] * dilations[d];
        q_rest /= in[d];
        t_rest /= kernel[d];
        fits = fits && start >= 0 && start % strides[d] == 0 && start / strides[d] < out[d];
        p += start / strides[d] * p_stride;
        p_stride *= out[d];
      }
      if (fits) {
        fn(p, t);
      }
    }
  }
};

template <typename I>
PoolDims<I> dims_of(const KernelContext& context) {
  const Pool pool = pool_of(context);
  const Window& w = pool.window;
  PoolDims<I> dims{};
  dims.ndim = w.ndim();
  dims.last = w.channels_last;
  dims.count_include_pad = pool.count_include_pad;
  dims.c = static_cast<I>(pool.in.c);
  dims.in_size = static_cast<I>(num_elements(pool.in.spatial));
  dims.out_size = static_cast<I>(num_elements(pool.out));
  for (int d = 0; d < dims.ndim; ++d) {
    const size_t i = static_cast<size_t>(d);
    dims.in[d] = static_cast<I>(pool.in.spatial[i]);
    dims.out[d] = static_cast<I>(pool.out[i]);
    dims.kernel[d] = static_cast<I>(w.kernel[i]);
    dims.strides[d] = static_cast<I>(w.strides[i]);
    dims.dilations[d] = static_cast<I>(w.dilations[i]);
    dims.pads_begin[d] = static_cast<I>(w.pads_begin[i]);
    dims.pads_end[d] = static_cast<I>(w.pads_end[i]);
  }
  return dims;
}

// Calls fn(dims) with numbers of 32 bits where those of all elements fit.
template <typename Fn>
void with_dims(const KernelContext& context, const Fn& fn) {
  const Pool pool = pool_of(context);
  const int64_t elements =
      pool.in.n * pool.in.c * std::max(num_elements(pool.in.spatial), num_elements(pool.out));
  if (elements <= int64_t{1} << 30) {
    fn(dims_of<int32_t>(context));
  } else {
    fn(dims_of<int64_t>(context));
  }
}

// Numbers of taps, in pool::tap_dtype.
struct Taps {
  uint8_t* narrow;
  int32_t* wide;
  TRAINRT_HOST_DEVICE bool wanted() const { return narrow != nullptr || wide != nullptr; }
  TRAINRT_HOST_DEVICE int64_t get(int64_t i) const {
    return narrow != nullptr ? int64_t{narrow[i]} : int64_t{wide[i]};
  }
  TRAINRT_HOST_DEVICE void set(int64_t i, int64_t tap) const {
    if (narrow != nullptr) {
      narrow[i] = static_cast<uint8_t>(tap);
    } else {
      wide[i] = static_cast<int32_t>(tap);
    }
  }
};

Taps taps_at(const void* data, DType dtype) {
  void* taps = const_cast<void*>(data);
  if (dtype == DType::kUInt8) {
    return {static_cast<uint8_t*>(taps), nullptr};
  }
  return {nullptr, static_cast<int32_t*>(taps)};
}

// The first maximum of the window; NaN counts as larger than everything.
template <typename T, typename I>
struct MaxPoolElement {
  using C = ComputeOf<T>;
  PoolDims<I> dims;
  const T* x;
  T* y;
  int64_t* indices;
  Taps taps;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const I i = static_cast<I>(index);
    const I plane = dims.plane(i, dims.out_size, dims.in_size);
    const I p = dims.position(i, dims.out_size), num_taps = dims.window_size();
    I best = -1, tap = 0;
    C max = -std::numeric_limits<C>::infinity();
    for (I t = 0; t < num_taps; ++t) {
      const I at = dims.tap(p, t);
      if (at >= 0) {
        const C value = to_compute<C>(x[plane + at * dims.step()]);
        if (best < 0 || (!(value <= max) && max == max)) {
          best = at;
          tap = t;
          max = value;
        }
      }
    }
    y[i] = to_storage<T>(max);
    if (indices != nullptr) {
      indices[i] = plane + (best > 0 ? best : 0) * dims.step();
    }
    if (taps.wanted()) {
      taps.set(i, tap);
    }
  }
};

template <typename T, typename I>
struct MaxPoolGradElement {
  PoolDims<I> dims;
  Taps taps;
  const T* dy;
  T* dx;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    using C = ComputeOf<T>;
    const I i = static_cast<I>(index);
    const I plane = dims.plane(i, dims.in_size, dims.out_size);
    const MaxPoolGradElement& self = *this;
    C sum = 0;
    dims.for_each_window(dims.position(i, dims.in_size), [&](I p, I t) {
      const I at = plane + p * self.dims.step();
      sum += self.taps.get(at) == t ? to_compute<C>(self.dy[at]) : C(0);
    });
    dx[i] = to_storage<T>(sum);
  }
};

template <typename T, typename I>
struct AveragePoolElement {
  PoolDims<I> dims;
  const T* x;
  T* y;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    using C = ComputeOf<T>;
    const I i = static_cast<I>(index);
    const T* plane = x + dims.plane(i, dims.out_size, dims.in_size);
    const I p = dims.position(i, dims.out_size), taps = dims.window_size();
    C sum = 0;
    for (I t = 0; t < taps; ++t) {
      const I at = dims.tap(p, t);
      sum += at >= 0 ? to_compute<C>(plane[at * dims.step()]) : C(0);
    }
    y[i] = to_storage<T>(sum / static_cast<C>(dims.divisor(p)));
  }
};

template <typename T, typename I>
struct AveragePoolGradElement {
  PoolDims<I> dims;
  const T* dy;
  T* dx;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    using C = ComputeOf<T>;
    const I i = static_cast<I>(index);
    const T* plane = dy + dims.plane(i, dims.in_size, dims.out_size);
    const PoolDims<I>& d = dims;
    C sum = 0;
    dims.for_each_window(dims.position(i, dims.in_size), [&](I p, I) {
      sum += to_compute<C>(plane[p * d.step()]) / static_cast<C>(d.divisor(p));
    });
    dx[i] = to_storage<T>(sum);
  }
};

// Launches Element<T, I>{dims, more...} for every element of output 0.
template <template <typename, typename> class Element, typename T, typename... More>
void launch_pool(KernelContext& context, const More&... more) {
  with_dims(context, [&](const auto& dims) {
    using I = std::remove_cvref_t<decltype(dims.c)>;
    launch(context, num_elements(context.output_shape(0)), Element<T, I>{dims, more...});
  });
}

void max_pool_cuda(KernelContext& context) {
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_pool<MaxPoolElement, T>(
        context,
        context.input<T>(0),
        context.output<T>(0),
        context.output<int64_t>(1),
        context.has_output(2) ? taps_at(context.raw_output(2), context.output_dtype(2)) : Taps());
  });
}

void max_pool_grad_cuda(KernelContext& context) {
  dispatch_stored(context.node(), context.input_dtype(1), [&](auto tag) {
    using T = decltype(tag);
    launch_pool<MaxPoolGradElement, T>(context,
                                       taps_at(context.raw_input(0), context.input_dtype(0)),
                                       context.input<T>(1),
                                       context.output<T>(0));
  });
}

void average_pool_cuda(KernelContext& context) {
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_pool<AveragePoolElement, T>(context, context.input<T>(0), context.output<T>(0));
  });
}

void average_pool_grad_cuda(KernelContext& context) {
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_pool<AveragePoolGradElement, T>(context, context.input<T>(0), context.output<T>(0));
  });
}

const RegisterCudaKernel kMaxPool{"MaxPool", max_pool_cuda};
const RegisterCudaKernel kMaxPoolGrad{"MaxPoolGrad", max_pool_grad_cuda};
const RegisterCudaKernel kAveragePool{"AveragePool", average_pool_cuda};
const RegisterCudaKernel kAveragePoolGrad{"AveragePoolGrad", average_pool_grad_cuda};

}  // namespace

}  // namespace trainrt::pool
