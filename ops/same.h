// What a cast does to one element: the types of what is read and written do the rest.
#pragma once

#include "ops/host_device.h"

namespace trainrt {

struct Same {
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T x) const {
    return x;
  }
};

}  // namespace trainrt
