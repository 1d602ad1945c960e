// What the bitwise operators do to one integer, on every device.
#pragma once

#include "ops/host_device.h"

namespace trainrt {

struct BitwiseAnd {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    return a & b;
  }
};

struct BitwiseOr {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    return a | b;
  }
};

struct BitwiseXor {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    return a ^ b;
  }
};

struct BitwiseNot {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return ~x;
  }
};

}  // namespace trainrt
