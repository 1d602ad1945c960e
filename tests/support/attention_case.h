// FusedAttention and its gradient on a device, against the CPU.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "tests/support/op_example.h"

namespace trainrt::testing {

struct AttentionCase {
  std::string name;
  Shape q, k, v;  // v's width may differ
  bool causal = true;
  std::vector<int64_t> sequence_major = {0, 0, 0, 0};
  DType dtype = DType::kBFloat16;
  std::optional<int64_t> workspace_cap = std::nullopt;
  std::optional<Shape> mask = std::nullopt;
  bool fused = true;          // by cuDNN, where there is one: for the test to look at
  bool hides_sample = false;  // all keys of the mask's second sample
  bool opposed = false;       // queries point away from all keys: scores are about -100
};

NodeCase forward_case(const AttentionCase& c);
// Of what forward_case gave.
NodeCase backward_case(const AttentionCase& c,
                       const NodeCase& forward,
                       const std::vector<Tensor>& results);

// Runs the case on the device and expects the float32 results of the CPU's reference, of the same
// rounded inputs, within the table's tolerances.
std::vector<Tensor> expect_results_of_cpu(const NodeCase& test_case,
                                          const AttentionCase& c,
                                          Device& device);

}  // namespace trainrt::testing
