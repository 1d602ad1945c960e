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
  // Integers truncate towards zero, as ONNX says since opset 24 and everybody did before, and wrap:
  // the least one by -1 is itself. A zero divisor gives 0 where it gets here
  // (ops/integer_division.h).
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;
      return b == 0                              ? T(0)
             : b == T(-1) && std::is_signed_v<T> ? static_cast<T>(Unsigned(0) - Unsigned(a))
                                                 : a / b;
    } else {
      return a / b;
    }
  }
};

}  // namespace trainrt
