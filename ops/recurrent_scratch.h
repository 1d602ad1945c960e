// How the CUDA kernels of the recurrent layers divide their workspace.
#pragma once

#include <cstdint>

#include "ops/host_device.h"

namespace trainrt::recurrent {

// Elements of the state of one sample: six vectors of hidden units, the gradients of three
// peepholes, and three vectors of gates.
TRAINRT_HOST_DEVICE inline int64_t scratch_elements(int64_t gates, int64_t hidden) {
  return (9 + 3 * gates) * hidden;
}

}  // namespace trainrt::recurrent
