// What Min and Max do to one element, on every device.
#pragma once

#include "ops/host_device.h"

namespace trainrt {

struct Min {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    return a < b || a != a ? a : b;
  }
};

struct Max {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    return a > b || a != a ? a : b;
  }
};

// (operand, other operand, dy) -> gradient of the operand.
struct MinGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b, T dy) const {
    return a < b ? dy : a == b ? T(0.5) * dy : T(0);
  }
};

struct MaxGrad {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b, T dy) const {
    return a > b ? dy : a == b ? T(0.5) * dy : T(0);
  }
};

}  // namespace trainrt
