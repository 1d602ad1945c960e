// A NodeCase on a device with memory of its own: a GPU, or its double.
#pragma once

#include <optional>
#include <vector>

#include "runtime/device.h"
#include "tests/support/op_example.h"

namespace trainrt::testing {

// Outputs of the node. Every tensor has memory of its own, so that a kernel that reads or writes
// past one is noticed where the device guards its memory. `workspace_cap`: other than the device's.
// `replayed`: the outputs of a second run, which is recorded, as those of later steps are.
std::vector<Tensor> run_on_device(const NodeCase& test_case,
                                  Device& device,
                                  std::optional<int64_t> workspace_cap = std::nullopt,
                                  bool replayed = false);

// For every example of `op`, in float32 and float64, and in the 16-bit floats that the CPU takes:
// the device's outputs are those of the reference kernel, within the table's tolerances; those of a
// recorded run, too.
void expect_reference_results(const OpDef& op, Device& device);

// Collectives and transfers have an effect but no kernel: communicators carry them out.
bool is_communication_op(const OpDef& op);

}  // namespace trainrt::testing
