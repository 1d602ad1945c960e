// CUDA kernels of the pools: one thread per element written, or per pack of channels, which gathers
// what it needs, so that no two threads meet. Coordinates are divided out once per thread; windows
// and taps are then walked by addition. ops/pool.cc has the definitions.
//
// Not through cuDNN: what its maximum pool notes for the gradient is of cuDNN's own form, where our
// taps are an output of the graph that both devices agree on, and averages are bound by memory.
#include <algorithm>
#include <limits>

#include "ops/channel_pack.cuh"
#include "ops/elementwise.cuh"
#include "ops/launch.cuh"
#include "ops/pool.h"

namespace trainrt::pool {

namespace {

constexpr int kSpatial = 3;

// ops/pool.h's Pool as a kernel can carry it: missing spatial dims come first and are of size one.
// An element is that of one channel, or a pack of kCount of them where channels lie side by side;
// offsets count such elements.
// I: an integer that holds every number of an element; 32-bit divisions take a fraction of the
// time of 64-bit ones.
template <typename I>
struct PoolDims {
  bool last;  // nhwc
  bool count_include_pad;
  I c;  // elements of a position
  I in[kSpatial], out[kSpatial];
  I kernel[kSpatial], strides[kSpatial], dilations[kSpatial];
  I pads_begin[kSpatial], pads_end[kSpatial];

  // An element by its coordinates; `image` counts planes, too, where these are apart.
  struct Place {
    I image, at[kSpatial], channel;
  };
  TRAINRT_HOST_DEVICE Place place(I i, const I (&sizes)[kSpatial]) const {
    Place place{};
    if (last) {
      place.channel = i % c;
      i /= c;
    }
    for (int d = kSpatial - 1; d >= 0; --d) {
      place.at[d] = i % sizes[d];
      i /= sizes[d];
    }
    place.image = i;
    return place;
  }
  // Where the plane of such an element begins, and the distance of positions.
  TRAINRT_HOST_DEVICE I plane(const Place& place, const I (&sizes)[kSpatial]) const {
    return place.image * (sizes[0] * sizes[1] * sizes[2]) * step() + place.channel;
  }
  TRAINRT_HOST_DEVICE I step() const { return last ? c : 1; }

  // Calls fn(offset, t) for the taps t of output position p that lie in the image, in ascending
  // order.
  template <typename Fn>
  TRAINRT_HOST_DEVICE void for_each_tap(const I (&p)[kSpatial], const Fn& fn) const {
    I start[kSpatial];
    for (int d = 0; d < kSpatial; ++d) {
      start[d] = p[d] * strides[d] - pads_begin[d];
    }
    for (I t0 = 0; t0 < kernel[0]; ++t0) {
      const I i0 = start[0] + t0 * dilations[0];
      for (I t1 = 0; i0 >= 0 && i0 < in[0] && t1 < kernel[1]; ++t1) {
        const I i1 = start[1] + t1 * dilations[1];
        for (I t2 = 0; i1 >= 0 && i1 < in[1] && t2 < kernel[2]; ++t2) {
          const I i2 = start[2] + t2 * dilations[2];
          if (i2 >= 0 && i2 < in[2]) {
            fn(((i0 * in[1] + i1) * in[2] + i2) * step(), (t0 * kernel[1] + t1) * kernel[2] + t2);
          }
        }
      }
    }
  }

  // The windows along dim d that may reach input position q.
  struct Range {
    I first, last;
  };
  TRAINRT_HOST_DEVICE Range windows(int d, I q) const {
    const I reach = q + pads_begin[d], low = reach - (kernel[d] - 1) * dilations[d];
    const I last_window = reach / strides[d];
    return {low > 0 ? (low + strides[d] - 1) / strides[d] : 0,
            last_window < out[d] ? last_window : out[d] - 1};
  }
  // Which tap of window p along dim d input position q is; -1 if it lies between two.
  TRAINRT_HOST_DEVICE I tap(int d, I p, I q) const {
    const I distance = q + pads_begin[d] - p * strides[d];
    if (dilations[d] == 1) {
      return distance;
    }
    return distance % dilations[d] == 0 ? distance / dilations[d] : -1;
  }
  // Calls fn(p, t) for the output positions p whose window has input position q as tap t, in
  // ascending order.
  template <typename Fn>
  TRAINRT_HOST_DEVICE void for_each_window(const I (&q)[kSpatial], const Fn& fn) const {
    const Range range0 = windows(0, q[0]), range1 = windows(1, q[1]), range2 = windows(2, q[2]);
    for (I p0 = range0.first; p0 <= range0.last; ++p0) {
      const I t0 = tap(0, p0, q[0]);
      for (I p1 = range1.first; t0 >= 0 && p1 <= range1.last; ++p1) {
        const I t1 = tap(1, p1, q[1]);
        for (I p2 = range2.first; t1 >= 0 && p2 <= range2.last; ++p2) {
          const I t2 = tap(2, p2, q[2]);
          if (t2 >= 0) {
            const I p[kSpatial] = {p0, p1, p2};
            fn(p, (t0 * kernel[1] + t1) * kernel[2] + t2);
          }
        }
      }
    }
  }
  TRAINRT_HOST_DEVICE I output_offset(const I (&p)[kSpatial]) const {
    return ((p[0] * out[1] + p[1]) * out[2] + p[2]) * step();
  }

  // What an average over the window of output position p divides by.
  TRAINRT_HOST_DEVICE I divisor(const I (&p)[kSpatial]) const {
    I product = 1;
    for (int d = 0; d < kSpatial; ++d) {
      const I start = p[d] * strides[d] - pads_begin[d];
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
};

// For elements of `count` channels.
template <typename I>
PoolDims<I> dims_of(const Pool& pool, int count) {
  const Window& w = pool.window;
  PoolDims<I> dims{};
  dims.last = w.channels_last;
  dims.count_include_pad = pool.count_include_pad;
  dims.c = static_cast<I>(pool.in.c / count);
  const int missing = kSpatial - w.ndim();
  for (int d = 0; d < kSpatial; ++d) {
    const bool real = d >= missing;
    const size_t i = static_cast<size_t>(real ? d - missing : 0);
    const auto number = [&](const Shape& of, I otherwise) {
      return real ? static_cast<I>(of[i]) : otherwise;
    };
    dims.in[d] = number(pool.in.spatial, 1);
    dims.out[d] = number(pool.out, 1);
    dims.kernel[d] = number(w.kernel, 1);
    dims.strides[d] = number(w.strides, 1);
    dims.dilations[d] = number(w.dilations, 1);
    dims.pads_begin[d] = number(w.pads_begin, 0);
    dims.pads_end[d] = number(w.pads_end, 0);
  }
  return dims;
}

// Whether all numbers of a pool are within 32 bits.
bool is_narrow(const Pool& pool) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const Window& w = pool.window;
  bool narrow =
      pool.in.n * pool.in.c * std::max(num_elements(pool.in.spatial), num_elements(pool.out)) <=
      kMost;
  for (int d = 0; d < w.ndim(); ++d) {
    const size_t i = static_cast<size_t>(d);
    narrow = narrow && pool.in.spatial[i] + w.pads_begin[i] + w.pads_end[i] <= kMost &&
             w.extent(d) + w.strides[i] <= kMost;
  }
  return narrow;
}

// Numbers of taps, in pool::tap_dtype.
struct Taps {
  uint8_t* narrow;
  int32_t* wide;
  TRAINRT_HOST_DEVICE bool wanted() const { return narrow != nullptr || wide != nullptr; }
  // Of an element of kCount channels.
  template <int kCount>
  TRAINRT_HOST_DEVICE ChannelPack<int32_t, kCount> get(int64_t i) const {
    if (narrow == nullptr) {
      return load_pack<kCount>(wide + i * kCount);
    }
    const ChannelPack<uint8_t, kCount> bytes = load_pack<kCount>(narrow + i * kCount);
    ChannelPack<int32_t, kCount> taps;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      taps.values[j] = bytes.values[j];
    }
    return taps;
  }
  template <int kCount>
  TRAINRT_HOST_DEVICE void set(int64_t i, const ChannelPack<int32_t, kCount>& taps) const {
    if (narrow == nullptr) {
      store_pack<kCount>(wide + i * kCount, taps);
      return;
    }
    ChannelPack<uint8_t, kCount> bytes;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      bytes.values[j] = static_cast<uint8_t>(taps.values[j]);
    }
    store_pack<kCount>(narrow + i * kCount, bytes);
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
template <typename T, typename I, int kCount>
struct MaxPoolElement {
  using C = ComputeOf<T>;
  PoolDims<I> dims;
  const T* x;
  T* y;
  int64_t* indices;
  Taps taps;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const auto place = dims.place(static_cast<I>(index), dims.out);
    const I plane = dims.plane(place, dims.in);
    const T* from = x;
    C max[kCount];
    I best[kCount];
    ChannelPack<int32_t, kCount> tap;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      max[j] = -std::numeric_limits<C>::infinity();
      best[j] = 0;
      tap.values[j] = 0;
    }
    bool first = true;
    dims.for_each_tap(place.at, [&](I at, I t) {
      const auto pack = load_pack<kCount>(from + static_cast<int64_t>(plane + at) * kCount);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const C value = to_compute<C>(pack.values[j]);
        if (first || (!(value <= max[j]) && max[j] == max[j])) {
          best[j] = at;
          tap.values[j] = static_cast<int32_t>(t);
          max[j] = value;
        }
      }
      first = false;
    });
    ChannelPack<T, kCount> result;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      result.values[j] = to_storage<T>(max[j]);
      if (indices != nullptr) {
        indices[index * kCount + j] = static_cast<int64_t>(plane + best[j]) * kCount + j;
      }
    }
    store_pack<kCount>(y + index * kCount, result);
    if (taps.wanted()) {
      taps.set<kCount>(index, tap);
    }
  }
};

// Sums of an element that kernels below add up.
template <typename T, int kCount>
struct Sums {
  ComputeOf<T> values[kCount] = {};
  TRAINRT_HOST_DEVICE void store(T* to, int64_t index, ComputeOf<T> divisor) const {
    ChannelPack<T, kCount> result;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      result.values[j] = to_storage<T>(values[j] / divisor);
    }
    store_pack<kCount>(to + index * kCount, result);
  }
};

template <typename T, typename I, int kCount>
struct MaxPoolGradElement {
  using C = ComputeOf<T>;
  PoolDims<I> dims;
  Taps taps;
  const T* dy;
  T* dx;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const auto place = dims.place(static_cast<I>(index), dims.in);
    const I plane = dims.plane(place, dims.out);
    const MaxPoolGradElement& self = *this;
    Sums<T, kCount> sums;
    dims.for_each_window(place.at, [&](const I(&p)[kSpatial], I t) {
      const int64_t at = plane + self.dims.output_offset(p);
      const auto tap = self.taps.template get<kCount>(at);
      const auto pack = load_pack<kCount>(self.dy + at * kCount);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        sums.values[j] += tap.values[j] == t ? to_compute<C>(pack.values[j]) : C(0);
      }
    });
    sums.store(dx, index, C(1));
  }
};

template <typename T, typename I, int kCount>
struct AveragePoolElement {
  using C = ComputeOf<T>;
  PoolDims<I> dims;
  const T* x;
  T* y;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const auto place = dims.place(static_cast<I>(index), dims.out);
    const T* plane = x + static_cast<int64_t>(dims.plane(place, dims.in)) * kCount;
    Sums<T, kCount> sums;
    dims.for_each_tap(place.at, [&](I at, I) {
      const auto pack = load_pack<kCount>(plane + static_cast<int64_t>(at) * kCount);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        sums.values[j] += to_compute<C>(pack.values[j]);
      }
    });
    sums.store(y, index, static_cast<C>(dims.divisor(place.at)));
  }
};

template <typename T, typename I, int kCount>
struct AveragePoolGradElement {
  using C = ComputeOf<T>;
  PoolDims<I> dims;
  const T* dy;
  T* dx;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const auto place = dims.place(static_cast<I>(index), dims.in);
    const T* plane = dy + static_cast<int64_t>(dims.plane(place, dims.out)) * kCount;
    const PoolDims<I>& d = dims;
    Sums<T, kCount> sums;
    dims.for_each_window(place.at, [&](const I(&p)[kSpatial], I) {
      const auto pack =
          load_pack<kCount>(plane + static_cast<int64_t>(d.output_offset(p)) * kCount);
      const C divisor = static_cast<C>(d.divisor(p));
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        sums.values[j] += to_compute<C>(pack.values[j]) / divisor;
      }
    });
    sums.store(dx, index, C(1));
  }
};

// Launches Element<T, I, kCount>{dims, more...} for every element of output 0.
template <template <typename, typename, int> class Element, typename T, typename... More>
void launch_pool(KernelContext& context, const More&... more) {
  constexpr int kPacked = kChannelPack<T>;
  const Pool pool = pool_of(context);
  const int64_t elements = num_elements(context.output_shape(0));
  bool packed = pool.window.channels_last && is_narrow(pool);
  for (int i = 0; i < context.num_inputs(); ++i) {
    packed = packed && takes_packs(pool.in.c, kPacked, {context.raw_input(i)});
  }
  for (int i = 0; i < context.num_outputs(); ++i) {
    packed = packed && takes_packs(pool.in.c, kPacked, {context.raw_output(i)});
  }
  if (packed) {
    launch(context,
           elements / kPacked,
           Element<T, int32_t, kPacked>{dims_of<int32_t>(pool, kPacked), more...});
  } else if (is_narrow(pool)) {
    launch(context, elements, Element<T, int32_t, 1>{dims_of<int32_t>(pool, 1), more...});
  } else {
    launch(context, elements, Element<T, int64_t, 1>{dims_of<int64_t>(pool, 1), more...});
  }
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
