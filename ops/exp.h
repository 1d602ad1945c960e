// What Exp, Log, Sqrt, Reciprocal and their gradients do to one element, on every device.
#pragma once

#include <cmath>

#include "ops/host_device.h"
#include "ops/vector_math.h"

namespace trainrt {

struct Exp {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return vmath::exp(x);
  }
};

struct Log {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return vmath::log(x);
  }
};

struct Sqrt {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return std::sqrt(x);
  }
};

struct SqrtGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T y, T dy) const {
    return dy / (T(2) * y);
  }
};

struct Reciprocal {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return T(1) / x;
  }
};

struct ReciprocalGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T y, T dy) const {
    return -dy * y * y;
  }
};

}  // namespace trainrt
