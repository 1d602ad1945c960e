// What Add and Sub do to one element, on every device.
#pragma once

#include "ops/host_device.h"

namespace trainrt {

struct Add {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};

struct Sub {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T a, T b) const {
    return a - b;
  }
};

}  // namespace trainrt
