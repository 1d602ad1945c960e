// What HardSigmoid, HardSwish and Shrink do to one element, on every device.
#pragma once

#include "graph/attribute.h"
#include "ops/host_device.h"

namespace trainrt {

struct HardSigmoidConstants {
  explicit HardSigmoidConstants(const Attributes& attributes)
      : alpha(attributes.get_float("alpha", 0.2)), beta(attributes.get_float("beta", 0.5)) {}
  double alpha, beta;
};

struct HardSigmoid : HardSigmoidConstants {
  using HardSigmoidConstants::HardSigmoidConstants;
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    const T line = T(alpha) * x + T(beta);
    return line < T(0) ? T(0) : line > T(1) ? T(1) : line;
  }
};

struct HardSigmoidGrad : HardSigmoidConstants {
  using HardSigmoidConstants::HardSigmoidConstants;
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    const T line = T(alpha) * x + T(beta);
    return line > T(0) && line < T(1) ? T(alpha) * dy : T(0);
  }
};

struct HardSwish {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    const T line = x / T(6) + T(0.5);
    return x * (line < T(0) ? T(0) : line > T(1) ? T(1) : line);
  }
};

struct HardSwishGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return x < T(-3) ? T(0) : x > T(3) ? dy : dy * (x / T(3) + T(0.5));
  }
};

struct ShrinkConstants {
  explicit ShrinkConstants(const Attributes& attributes)
      : bias(attributes.get_float("bias", 0.0)), lambd(attributes.get_float("lambd", 0.5)) {}
  double bias, lambd;
};

struct Shrink : ShrinkConstants {
  using ShrinkConstants::ShrinkConstants;
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    // In double for integers too: bias and lambd need not be whole.
    const double value = static_cast<double>(x);
    return value < -lambd  ? static_cast<T>(value + bias)
           : value > lambd ? static_cast<T>(value - bias)
                           : T(0);
  }
};

struct ShrinkGrad : ShrinkConstants {
  using ShrinkConstants::ShrinkConstants;
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return x < T(-lambd) || x > T(lambd) ? dy : T(0);
  }
};

}  // namespace trainrt
