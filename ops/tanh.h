// What Tanh, Sigmoid and Erf do to one element, on every device.
#pragma once

#include <numbers>

#include "ops/host_device.h"
#include "ops/vector_math.h"

namespace trainrt {

struct Tanh {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return vmath::tanh(x);
  }
};

struct TanhGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T y, T dy) const {
    return dy * (T(1) - y * y);
  }
};

struct Sigmoid {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return vmath::sigmoid(x);
  }
};

struct SigmoidGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T y, T dy) const {
    return dy * y * (T(1) - y);
  }
};

struct Erf {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return vmath::erf(x);
  }
};

struct ErfGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return dy * T(2 * std::numbers::inv_sqrtpi) * vmath::exp(-x * x);
  }
};

}  // namespace trainrt
