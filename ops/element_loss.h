// The element losses: the loss of one element and its derivative, on every device.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/host_device.h"
#include "ops/vector_math.h"

namespace trainrt {

// Elements are summed in blocks of this many, and the blocks in order.
inline constexpr int64_t kElementLossBlock = 16384;

// One functor per kind: the loss of an element and its derivative.
struct SquaredError {
  template <typename T>
  TRAINRT_HOST_DEVICE static T loss(T x, T t) {
    return (x - t) * (x - t);
  }
  template <typename T>
  TRAINRT_HOST_DEVICE static T slope(T x, T t) {
    return T(2) * (x - t);
  }
};

struct AbsoluteError {
  template <typename T>
  TRAINRT_HOST_DEVICE static T loss(T x, T t) {
    return std::fabs(x - t);
  }
  template <typename T>
  TRAINRT_HOST_DEVICE static T slope(T x, T t) {
    return T(x > t) - T(x < t);
  }
};

struct BceWithLogits {
  template <typename T>
  TRAINRT_HOST_DEVICE static T loss(T x, T t) {
    return (x > T(0) ? x : T(0)) - x * t + vmath::log1p(vmath::exp(-std::fabs(x)));
  }
  template <typename T>
  TRAINRT_HOST_DEVICE static T slope(T x, T t) {
    return vmath::sigmoid(x) - t;
  }
};

}  // namespace trainrt
