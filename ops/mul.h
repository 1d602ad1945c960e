// What Mul and Div do to one element, on every device.
#pragma once

#include <type_traits>

#include "ops/host_device.h"

namespace trainrt {

struct Mul {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    return a * b;
  }
};

struct Div {
  // Integers truncate towards zero, as ONNX says since opset 24 and everybody did before; a zero
  // divisor, which C++ leaves undefined, gives 0.
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      return b == 0 ? T(0) : b == T(-1) && std::is_signed_v<T> ? T(0) - a : a / b;
    } else {
      return a / b;
    }
  }
};

}  // namespace trainrt
