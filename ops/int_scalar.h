// An operand that is one integer, known when the model is imported: an axis, a count.
#pragma once

#include "graph/upgrade.h"

namespace trainrt {

// Throws kInvalidModel when input i has more or fewer elements, and what int_input() throws.
inline int64_t int_scalar(const UpgradeContext& u, int i) {
  const std::vector<int64_t> values = u.int_input(i);
  TRAINRT_REQUIRE(values.size() == 1,
                  kInvalidModel,
                  "input ",
                  i,
                  " has ",
                  values.size(),
                  " elements; wanted 1");
  return values[0];
}

}  // namespace trainrt
