// Every operator's CUDA kernel, on the double, against its reference kernel on the CPU.
#include <gtest/gtest.h>

#include "graph/op_def.h"
#include "tests/cuda/cuda_double_device.h"
#include "tests/support/device_case.h"
#include "tests/support/empty_case.h"
#include "tests/support/tolerance.h"

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

TEST_P(CudaOperatorTest, TakesTensorsWithoutElements) {
  const OpDef& op = get_op(GetParam());
  // No rows have no place for one, which nobody asks StoreRow for.
  if (is_communication_op(op) || op.name == "StoreRow") {
    return;
  }
  for (const OpExample& example : op.examples) {
    for_each_empty_case(op, example, [&](const NodeCase& test_case) {
      // The attention that the gradient is given was made of queries with elements.
      if (op.name == "FusedAttentionGrad" && test_case.input_types[0].shape.back() == 0) {
        return;
      }
      const std::vector<Tensor> expected = run_case(test_case);
      const std::vector<Tensor> actual = run_on_device(test_case, *device_);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(tensors_near(actual[i], expected[i], kernel_tolerance(expected[i].dtype())))
            << "output " << i;
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Registry,
                         CudaOperatorTest,
                         ::testing::ValuesIn(op_names()),
                         [](const auto& row) { return test_name(row.param); });

}  // namespace
}  // namespace trainrt::testing
