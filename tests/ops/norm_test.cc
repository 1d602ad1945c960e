// Normalizations of 16-bit tensors on the CPU.
#include <gtest/gtest.h>

#include "tests/support/norm_case.h"

namespace trainrt::testing {
namespace {

TEST(NormTest, StatisticsOfSixteenBitRowsAreFloat32) {
  for (const char* op : {"LayerNormalization", "RMSNormalization", "GroupNorm"}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      for (const bool reference : {true, false}) {
        SCOPED_TRACE(reference ? "reference" : "fast");
        const auto run = [&](const NodeCase& test_case) {
          return run_case(test_case, {.reference = reference});
        };
        expect_exact_statistics(op, dtype, run);
        if (std::string(op) == "GroupNorm") {
          expect_exact_statistics(op, dtype, run, /*last=*/true);
        }
      }
    }
  }
}

}  // namespace
}  // namespace trainrt::testing
