// The one table of tolerances (CONTRACT section 5), and comparisons that say where two tensors
// differ.
#pragma once

#include <gtest/gtest.h>

#include "graph/tensor.h"

namespace trainrt::testing {

// Fast kernel against reference kernel: relative L2 error per tensor.
double kernel_tolerance(DType dtype);

// |a - b|_2 / |b|_2, in double; equal infinities and NaN count as equal. 0 for two zero tensors.
double relative_error(const Tensor& actual, const Tensor& expected);

// Equal shapes and dtypes; floats within `tolerance` of relative_error(), all else equal.
::testing::AssertionResult tensors_near(const Tensor& actual,
                                        const Tensor& expected,
                                        double tolerance);

// Equal bits; names the first element that differs.
::testing::AssertionResult tensors_identical(const Tensor& actual, const Tensor& expected);

}  // namespace trainrt::testing
