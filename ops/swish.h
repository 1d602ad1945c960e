// What Swish and its gradient do to one element, on every device.
#pragma once

#include "graph/attribute.h"
#include "ops/host_device.h"
#include "ops/vector_math.h"

namespace trainrt {

struct Swish {
  explicit Swish(const Attributes& attributes) : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x * vmath::sigmoid(T(alpha) * x);
  }
  double alpha;
};

struct SwishGrad {
  explicit SwishGrad(const Attributes& attributes) : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    const T s = vmath::sigmoid(T(alpha) * x);
    return dy * (s + T(alpha) * x * s * (T(1) - s));
  }
  double alpha;
};

}  // namespace trainrt
