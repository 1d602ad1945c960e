// Gradients against central differences in float64, under a random upstream gradient: an upstream
// of ones hides every error that sums to zero (softmax, normalisation).
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace trainrt::testing {

struct GradientCheckOptions {
  uint64_t seed = 1;
  int max_elements = 48;    // checked per input, drawn at random when there are more
  double step = 1e-5;       // times max(1, |x|)
  double tolerance = 1e-6;  // relative to max(1, |gradient|, largest gradient of the input)
};

// Differentiates sum_i <outputs[i], r_i> for random r_i with respect to `inputs` (values without
// producer whose contents are in `feeds`, float64) and compares with finite differences.
::testing::AssertionResult gradients_match_finite_differences(
    const Graph& graph,
    const std::vector<ValueId>& outputs,
    const std::vector<ValueId>& inputs,
    const std::map<std::string, Tensor>& feeds,
    const GradientCheckOptions& options = {});

}  // namespace trainrt::testing
