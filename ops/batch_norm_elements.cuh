// What BatchNorm's CUDA kernels do element by element, and to packs of channels where those lie
// side by side.
#pragma once

#include "ops/channel_pack.cuh"

namespace trainrt::batch_norm {

struct Image {
  int64_t n, c, s;
  bool columns;  // channels are contiguous
  TRAINRT_HOST_DEVICE int64_t channel(int64_t i) const {
    return divide(columns ? i : divide(i, s).quotient, c).remainder;
  }
  // Element i of the n * s of a channel.
  TRAINRT_HOST_DEVICE int64_t at(int64_t channel, int64_t i) const {
    return columns ? i * c + channel : (i / s * c + channel) * s + i % s;
  }
};

// What BatchNormApply makes of an element before the ReLU; again from x in the gradients, by the
// same arithmetic. Its numbers of a channel are computed once, not by every element.
template <typename C>
struct Affine {
  C *mean, *factor, *shift;
  TRAINRT_HOST_DEVICE C operator()(C x, int64_t channel) const {
    return of(x, mean[channel], factor[channel], shift[channel]);
  }
  TRAINRT_HOST_DEVICE static C of(C x, C mean, C factor, C shift) {
    return (x - mean) * factor + shift;
  }
};

// The numbers of kChannelPack channels, in registers.
template <typename C, int kCount>
struct AffinePack {
  ChannelPack<C, kCount> mean, factor, shift;
  TRAINRT_HOST_DEVICE AffinePack(const Affine<C>& of, int64_t channel)
      : mean(load_pack<kCount>(of.mean + channel)),
        factor(load_pack<kCount>(of.factor + channel)),
        shift(load_pack<kCount>(of.shift + channel)) {}
  TRAINRT_HOST_DEVICE C operator()(C x, int j) const {
    return Affine<C>::of(x, mean.values[j], factor.values[j], shift.values[j]);
  }
};

template <typename T>
struct BatchNormElement {
  using C = ComputeOf<T>;
  Image v;
  const T *x, *residual;
  T* y;
  Affine<C> affine;
  bool relu;
  // `h` behind the scale and bias, `more` the residual's element.
  TRAINRT_HOST_DEVICE T result(C h, T more) const {
    if (residual != nullptr) {
      h += to_compute<C>(more);
    }
    return to_storage<T>(relu && h < C(0) ? C(0) : h);  // NaN stays
  }
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    y[i] =
        result(affine(to_compute<C>(x[i]), v.channel(i)), residual == nullptr ? T{} : residual[i]);
  }
};

// The same for a pack of channels in kPackRows rows: their numbers are read once, and all elements
// before the first is written, which may lie over one of them.
constexpr int kPackRows = 4;

struct PackPlace {
  int64_t channel, first, rows;  // the pack's in its first row; rows that there are
};
TRAINRT_HOST_DEVICE inline PackPlace pack_place(const Image& v, int64_t index, int count) {
  const Quotient place = divide(index, v.c / count);
  const int64_t channel = place.remainder * count, row = place.quotient * kPackRows;
  return {channel, row * v.c + channel, v.n * v.s - row};
}
template <typename T>
struct BatchNormPacks {
  using C = ComputeOf<T>;
  static constexpr int kCount = kChannelPack<T>;
  BatchNormElement<T> element;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t c = element.v.c;
    const auto [channel, first, rows] = pack_place(element.v, index, kCount);
    ChannelPack<T, kCount> x[kPackRows], more[kPackRows];
#pragma unroll
    for (int k = 0; k < kPackRows; ++k) {
      if (k < rows) {
        x[k] = load_pack<kCount>(element.x + first + k * c);
        if (element.residual != nullptr) {
          more[k] = load_pack<kCount>(element.residual + first + k * c);
        }
      }
    }
    const AffinePack<C, kCount> affine(element.affine, channel);
#pragma unroll
    for (int k = 0; k < kPackRows; ++k) {
      if (k < rows) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          x[k].values[j] =
              element.result(affine(to_compute<C>(x[k].values[j]), j), more[k].values[j]);
        }
        store_pack<kCount>(element.y + first + k * c, x[k]);
      }
    }
  }
};

// dx = factor (dy - (x slope + shift)), numbers of a channel again.
template <typename C>
struct Slopes {
  C *factor, *slope, *shift;
  TRAINRT_HOST_DEVICE static C of(C grad, C x, C factor, C slope, C shift) {
    return factor * (grad - (x * slope + shift));
  }
};

template <typename T>
struct BatchNormInputGradElement {
  using C = ComputeOf<T>;
  Image v;
  const T *dy, *x;
  T* dx;
  bool relu;
  Affine<C> affine;
  Slopes<C> slopes;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t channel = v.channel(i);
    const C value = to_compute<C>(x[i]);
    const bool passed = !relu || affine(value, channel) > C(0);
    const C grad = passed ? to_compute<C>(dy[i]) : C(0);
    dx[i] = to_storage<T>(Slopes<C>::of(
        grad, value, slopes.factor[channel], slopes.slope[channel], slopes.shift[channel]));
  }
};

template <typename T>
struct BatchNormInputGradPacks {
  using C = ComputeOf<T>;
  static constexpr int kCount = kChannelPack<T>;
  BatchNormInputGradElement<T> element;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t c = element.v.c;
    const auto [channel, first, rows] = pack_place(element.v, index, kCount);
    ChannelPack<T, kCount> dy[kPackRows], x[kPackRows];
#pragma unroll
    for (int k = 0; k < kPackRows; ++k) {
      if (k < rows) {
        dy[k] = load_pack<kCount>(element.dy + first + k * c);
        x[k] = load_pack<kCount>(element.x + first + k * c);
      }
    }
    if (element.relu) {
      const AffinePack<C, kCount> affine(element.affine, channel);
#pragma unroll
      for (int k = 0; k < kPackRows; ++k) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          if (k < rows && !(affine(to_compute<C>(x[k].values[j]), j) > C(0))) {
            dy[k].values[j] = to_storage<T>(C(0));
          }
        }
      }
    }
    const auto factor = load_pack<kCount>(element.slopes.factor + channel),
               slope = load_pack<kCount>(element.slopes.slope + channel),
               shift = load_pack<kCount>(element.slopes.shift + channel);
#pragma unroll
    for (int k = 0; k < kPackRows; ++k) {
      if (k < rows) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          dy[k].values[j] = to_storage<T>(Slopes<C>::of(to_compute<C>(dy[k].values[j]),
                                                        to_compute<C>(x[k].values[j]),
                                                        factor.values[j],
                                                        slope.values[j],
                                                        shift.values[j]));
        }
        store_pack<kCount>(element.dx + first + k * c, dy[k]);
      }
    }
  }
};

}  // namespace trainrt::batch_norm
