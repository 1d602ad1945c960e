// Normalizations of 16-bit rows far from 0, forward and backward, where the gradient has only the
// statistics that the forward operator has saved.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tests/support/op_example.h"

namespace trainrt::testing {

// Outputs of a node: by a kernel on the CPU, or on a device.
using CaseRunner = std::function<std::vector<Tensor>(const NodeCase&)>;

// x of mean 20 and deviation 1, through `op` (LayerNormalization, RMSNormalization or GroupNorm)
// and its gradient, in `dtype` by `run` and in float64 from the same rounded inputs: the statistics
// are float32, and none of the gradients is off by more than the rounding of dtype. `last`:
// GroupNorm's channels lie side by side.
void expect_exact_statistics(const std::string& op,
                             DType dtype,
                             const CaseRunner& run,
                             bool last = false);

}  // namespace trainrt::testing
