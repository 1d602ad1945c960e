// What Pow and its gradients do to one element, on every device.
#pragma once

#include <cmath>
#include <type_traits>

#include "graph/attribute.h"
#include "ops/host_device.h"

namespace trainrt {

template <typename T>
TRAINRT_HOST_DEVICE T power(T x, T e) {
  if constexpr (std::is_integral_v<T>) {
    if constexpr (std::is_signed_v<T>) {
      if (e < 0) {
        return x == 1 ? 1 : x == -1 ? (e & 1 ? -1 : 1) : 0;
      }
    }
    T result = 1;
    for (; e != 0; e >>= 1, x *= x) {
      result *= e & 1 ? x : T(1);
    }
    return result;
  } else {
    return std::pow(x, e);
  }
}

struct Pow {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T e) const {
    return power(x, e);
  }
};

struct Square {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T) const {
    return x * x;
  }
};

struct Cube {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T) const {
    return x * x * x;
  }
};

// The derivative by x for one exponent.
struct PowScalarGrad {
  explicit PowScalarGrad(const Attributes& attributes) : e(attributes.get_float("exponent")) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    if (e == 2) {
      return T(2) * x * dy;
    }
    if (e == 3) {
      return T(3) * x * x * dy;
    }
    return e == 0 ? T(0) : T(e) * std::pow(x, T(e - 1)) * dy;
  }
  double e;
};

struct PowInputGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T e, T dy) const {
    return e == T(0) ? T(0) : e * std::pow(x, e - T(1)) * dy;
  }
};

struct PowExponentGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T e, T dy) const {
    return x == T(0) && e >= T(0) ? T(0) : std::pow(x, e) * std::log(x) * dy;
  }
};

}  // namespace trainrt
