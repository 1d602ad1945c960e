// What Gelu and its gradient do to one element, on every device.
#pragma once

#include "ops/host_device.h"
#include "ops/vector_math.h"

namespace trainrt {

inline constexpr double kSqrtHalf = 0.70710678118654752440;
inline constexpr double kSqrtTwoOverPi = 0.79788456080286535588;
inline constexpr double kInvSqrtTwoPi = 0.39894228040143267794;
inline constexpr double kCubic = 0.044715;

struct GeluErf {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return T(0.5) * x * (T(1) + vmath::erf(x * T(kSqrtHalf)));
  }
};

template <typename T>
TRAINRT_HOST_DEVICE T twice_u(T x) {
  return T(2 * kSqrtTwoOverPi) * x * (T(1) + T(kCubic) * x * x);
}

struct GeluTanh {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x * vmath::sigmoid(twice_u(x));
  }
};

struct GeluErfGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    const T cdf = T(0.5) * (T(1) + vmath::erf(x * T(kSqrtHalf)));
    const T pdf = T(kInvSqrtTwoPi) * vmath::exp(T(-0.5) * x * x);
    return dy * (cdf + x * pdf);
  }
};

struct GeluTanhGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    const T s = vmath::sigmoid(twice_u(x));
    const T slope = T(2 * kSqrtTwoOverPi) * (T(1) + T(3 * kCubic) * x * x);
    return dy * (s + x * s * (T(1) - s) * slope);
  }
};

}  // namespace trainrt
