// What Relu and its relatives do to one element, on every device.
#pragma once

#include "graph/attribute.h"
#include "ops/host_device.h"

namespace trainrt {

struct Relu {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x < T(0) ? T(0) : x;  // NaN stays
  }
};

struct ReluGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T y, T dy) const {
    return y > T(0) ? dy : T(0);
  }
};

struct LeakyRelu {
  explicit LeakyRelu(const Attributes& attributes) : alpha(attributes.get_float("alpha", 0.01)) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x < T(0) ? T(alpha) * x : x;
  }
  double alpha;
};

struct LeakyReluGrad {
  explicit LeakyReluGrad(const Attributes& attributes)
      : alpha(attributes.get_float("alpha", 0.01)) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return x > T(0) ? dy : T(alpha) * dy;
  }
  double alpha;
};

struct ThresholdedRelu {
  explicit ThresholdedRelu(const Attributes& attributes)
      : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x > T(alpha) ? x : T(0);
  }
  double alpha;
};

struct ThresholdedReluGrad {
  explicit ThresholdedReluGrad(const Attributes& attributes)
      : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return x > T(alpha) ? dy : T(0);
  }
  double alpha;
};

struct PRelu {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T slope) const {
    return x < T(0) ? slope * x : x;
  }
};

struct PReluInputGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T slope, T dy) const {
    return x > T(0) ? dy : slope * dy;
  }
};

struct PReluSlopeGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return x < T(0) ? x * dy : T(0);
  }
};

}  // namespace trainrt
