// What Neg, Abs and Sign do to one element, on every device.
#pragma once

#include <type_traits>

#include "ops/host_device.h"

namespace trainrt {

struct Neg {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return T(0) - x;  // wraps for unsigned integers
  }
  TRAINRT_HOST_DEVICE double operator()(double x) const { return -x; }
  TRAINRT_HOST_DEVICE float operator()(float x) const { return -x; }
};

struct Abs {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    if constexpr (std::is_unsigned_v<T>) {
      return x;
    } else {
      return x < T(0) ? T(0) - x : T(0) + x;  // + 0 turns -0 into 0
    }
  }
};

struct Sign {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x > T(0) ? T(1) : x < T(0) ? T(0) - T(1) : x;  // zeros and NaN stay
  }
};

struct AbsGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return x > T(0) ? dy : x < T(0) ? -dy : T(0);
  }
};

}  // namespace trainrt
