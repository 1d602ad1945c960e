// Examples of operators with tensors that have no elements.
#pragma once

#include <functional>

#include "tests/support/op_example.h"

namespace trainrt::testing {

// Calls `check` with the example as it is without one factor of its sharding rule, for each factor:
// the dims that it is a part of are 0. What the operator refuses is left out; a refusal by way of
// an internal error fails the test.
void for_each_empty_case(const OpDef& op,
                         const OpExample& example,
                         const std::function<void(const NodeCase&)>& check);

}  // namespace trainrt::testing
