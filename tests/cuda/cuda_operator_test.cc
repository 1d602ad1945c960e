// Every operator's CUDA kernel, on the double, against its reference kernel on the CPU.
#include <gtest/gtest.h>

#include "graph/op_def.h"
#include "tests/cuda/cuda_double_device.h"
#include "tests/support/device_case.h"

namespace trainrt::testing {
namespace {

class CudaOperatorTest : public ::testing::TestWithParam<std::string> {
 protected:
  DoubleDevice device_;
};

TEST_P(CudaOperatorTest, EqualsTheReferenceKernel) {
  const OpDef& op = get_op(GetParam());
  if (is_communication_op(op)) {
    return;
  }
  ASSERT_TRUE(has_kernel(op.name, Backend::kCuda));
  expect_reference_results(op, *device_);
}

INSTANTIATE_TEST_SUITE_P(Registry,
                         CudaOperatorTest,
                         ::testing::ValuesIn(op_names()),
                         [](const auto& row) { return test_name(row.param); });

}  // namespace
}  // namespace trainrt::testing
