// What Clip and its gradient do to one element, on every device.
#pragma once

#include <limits>
#include <type_traits>

#include "graph/attribute.h"
#include "ops/host_device.h"

namespace trainrt {

struct Bounds {
  explicit Bounds(const Attributes& attributes)
      : has_min(attributes.has("min")),
        has_max(attributes.has("max")),
        min(attributes.get_float("min", 0)),
        max(attributes.get_float("max", 0)) {}
  // The bounds as T, absent ones at the end of its range.
  template <typename T>
  TRAINRT_HOST_DEVICE T low() const {
    if constexpr (std::is_integral_v<T>) {
      return has_min ? static_cast<T>(min) : std::numeric_limits<T>::min();
    } else {
      return has_min ? static_cast<T>(min) : -std::numeric_limits<T>::infinity();
    }
  }
  template <typename T>
  TRAINRT_HOST_DEVICE T high() const {
    if constexpr (std::is_integral_v<T>) {
      return has_max ? static_cast<T>(max) : std::numeric_limits<T>::max();
    } else {
      return has_max ? static_cast<T>(max) : std::numeric_limits<T>::infinity();
    }
  }
  bool has_min, has_max;
  double min, max;
};

struct Clip : Bounds {
  using Bounds::Bounds;
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    const T lower = x < low<T>() ? low<T>() : x;
    return lower > high<T>() ? high<T>() : lower;  // max wins when the bounds cross
  }
};

struct ClipGrad : Bounds {
  using Bounds::Bounds;
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x, T dy) const {
    return x >= low<T>() && x <= high<T>() ? dy : T(0);
  }
};

}  // namespace trainrt
