// Normalizations on the double.
#include <gtest/gtest.h>

#include "tests/cuda/cuda_double_device.h"
#include "tests/support/device_case.h"
#include "tests/support/norm_case.h"

namespace trainrt::testing {
namespace {

TEST(CudaNormTest, StatisticsOfSixteenBitRowsAreFloat32) {
  DoubleDevice device;
  for (const char* op : {"LayerNormalization", "RMSNormalization", "GroupNorm"}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      expect_exact_statistics(
          op, dtype, [&](const NodeCase& test_case) { return run_on_device(test_case, *device); });
    }
  }
}

}  // namespace
}  // namespace trainrt::testing
