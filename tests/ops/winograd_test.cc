// What the registry's tests of Conv and its gradients do not see: how Winograd's form shares work.
#include <gtest/gtest.h>

#include "graph/op_def.h"
#include "tests/support/op_example.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

TEST(WinogradTest, BitsDoNotDependOnThreads) {
  for (const char* name : {"Conv", "ConvInputGrad", "ConvWeightGrad"}) {
    const OpDef& op = get_op(name);
    int cases = 0;
    for (const OpExample& example : op.examples) {
      if (!example.name.starts_with("winograd")) {
        continue;
      }
      ++cases;
      const NodeCase test_case = make_case(op, example);
      const std::vector<Tensor> one = run_case(test_case, {.reference = false, .threads = 1});
      const std::vector<Tensor> three = run_case(test_case, {.reference = false, .threads = 3});
      EXPECT_TRUE(tensors_identical(three.at(0), one.at(0))) << name << " '" << example.name << "'";
    }
    EXPECT_GE(cases, 2) << name;
  }
}

}  // namespace
}  // namespace trainrt::testing
