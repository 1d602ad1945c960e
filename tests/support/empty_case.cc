#include "tests/support/empty_case.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace trainrt::testing {

namespace {

// `types` with the dims of `factor` made 0.
TensorTypes emptied(TensorTypes types, const std::vector<TensorFactors>& factors, int factor) {
  for (size_t i = 0; i < types.size(); ++i) {
    for (size_t d = 0; d < factors[i].size(); ++d) {
      const std::vector<int>& dim = factors[i][d];
      if (std::find(dim.begin(), dim.end(), factor) != dim.end()) {
        types[i].shape[d] = 0;
      }
    }
  }
  return types;
}

}  // namespace

void for_each_empty_case(const OpDef& op,
                         const OpExample& example,
                         const std::function<void(const NodeCase&)>& check) {
  const NodeCase full = make_case(op, example);
  const ShardingRule rule = op.sharding(full.context());
  for (int factor = 0; factor < static_cast<int>(rule.factors.size()); ++factor) {
    SCOPED_TRACE(concat("example '", example.name, "' without factor ", factor));
    OpExample changed = example;
    changed.inputs = emptied(full.input_types, rule.inputs, factor);
    changed.values = full.inputs;
    for (size_t i = 0; i < changed.inputs.size(); ++i) {
      if (full.present[i] && changed.inputs[i].shape != full.input_types[i].shape) {
        changed.values[i] = Tensor(changed.inputs[i].dtype, changed.inputs[i].shape);
      }
    }
    try {
      const NodeCase test_case = make_case(op, changed);
      if (test_case.output_types == emptied(full.output_types, rule.outputs, factor)) {
        check(test_case);
      }  // else attributes speak of the dim too
    } catch (const Error& error) {
      EXPECT_NE(error.code(), ErrorCode::kInternal) << error.what();
    }
  }
}

}  // namespace trainrt::testing
