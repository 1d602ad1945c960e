// What Floor, Ceil and Round do to one element, on every device.
#pragma once

#include <cmath>

#include "ops/host_device.h"

namespace trainrt {

struct Floor {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return std::floor(x);
  }
};

struct Ceil {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return std::ceil(x);
  }
};

struct Round {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return std::rint(x);
  }
};

}  // namespace trainrt
