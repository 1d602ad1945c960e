// What the trigonometric and hyperbolic functions do to one element, on every device.
#pragma once

#include <cmath>

#include "ops/host_device.h"

namespace trainrt {

// One functor for the function and one for its gradient, each an expression in x.
#define TRAINRT_FUNCTION(Name, function, derivative)    \
  struct Name {                                         \
    template <typename T>                               \
    TRAINRT_HOST_DEVICE T operator()(T x) const {       \
      return function;                                  \
    }                                                   \
  };                                                    \
  struct Name##Grad {                                   \
    template <typename T>                               \
    TRAINRT_HOST_DEVICE T operator()(T x, T dy) const { \
      return dy * (derivative);                         \
    }                                                   \
  };

TRAINRT_FUNCTION(Sin, std::sin(x), std::cos(x))
TRAINRT_FUNCTION(Cos, std::cos(x), -std::sin(x))
TRAINRT_FUNCTION(Tan, std::tan(x), T(1) / (std::cos(x) * std::cos(x)))
TRAINRT_FUNCTION(Asin, std::asin(x), T(1) / std::sqrt(T(1) - x * x))
TRAINRT_FUNCTION(Acos, std::acos(x), T(-1) / std::sqrt(T(1) - x * x))
TRAINRT_FUNCTION(Atan, std::atan(x), T(1) / (T(1) + x * x))
TRAINRT_FUNCTION(Sinh, std::sinh(x), std::cosh(x))
TRAINRT_FUNCTION(Cosh, std::cosh(x), std::sinh(x))
TRAINRT_FUNCTION(Asinh, std::asinh(x), T(1) / std::sqrt(x * x + T(1)))
TRAINRT_FUNCTION(Acosh, std::acosh(x), T(1) / std::sqrt((x - T(1)) * (x + T(1))))
TRAINRT_FUNCTION(Atanh, std::atanh(x), T(1) / (T(1) - x * x))
#undef TRAINRT_FUNCTION

}  // namespace trainrt
