// How a running statistic takes in one of a batch, on every device.
#pragma once

#include "graph/attribute.h"
#include "ops/host_device.h"

namespace trainrt {

struct RunningAverage {
  explicit RunningAverage(const Attributes& attributes)
      : momentum(attributes.get_float("momentum")) {}
  template <typename T>
  TRAINRT_HOST_DEVICE T operator()(T running, T batch) const {
    return running * T(momentum) + batch * (T(1) - T(momentum));
  }
  double momentum;
};

}  // namespace trainrt
