// Numbers of one type as another, defined for every value.
#pragma once

#include <limits>
#include <type_traits>

#include "graph/dtype.h"

namespace trainrt {

// What C++ leaves undefined and ONNX's Cast open: a float beyond an integer's range becomes the
// nearest integer, NaN becomes 0. A GPU's own conversions do neither for every type, so its kernels
// call this, too (nvcc takes constexpr functions): with 16-bit floats widened before and narrowed
// after.
template <typename To, typename From>
constexpr To convert_number(From value) {
  constexpr auto is_half = []<typename T>(T) {
    return std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;
  };
  if constexpr (is_half(From())) {
    return convert_number<To>(static_cast<float>(value));
  } else if constexpr (is_half(To())) {
    return To(static_cast<float>(value));
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To> &&
                       !std::is_same_v<To, bool>) {
    using Limits = std::numeric_limits<To>;
    // The largest integer of 64 bits rounds up: what is not below it is out of range, or itself.
    if (value >= static_cast<From>(Limits::max())) {
      return Limits::max();
    }
    if (value <= static_cast<From>(Limits::min())) {
      return Limits::min();
    }
    return value != value ? To(0) : static_cast<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

}  // namespace trainrt
