// Element-wise operators as steps of a FusedElementwise, for devices that compile its kernels.
#pragma once

#include <string>
#include <vector>

#include "graph/op_def.h"
#include "runtime/device.h"

namespace trainrt::testing {

// Those with an example that is floating-point throughout.
std::vector<std::string> elementwise_ops();

// FusedElementwise with examples of its own: each of the operator's as the first step, then Neg;
// the results of both are outputs.
OpDef as_step(const std::string& op);

// Fused or one after the other, on the same device: equal bits, in every type.
void expect_bits_of_single_kernels(const OpDef& fused, Device& device);

}  // namespace trainrt::testing
