// After a step has failed: which sample of which array, or which weight, may be to blame.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "runtime/data_loader.h"

namespace trainrt {

// The first value of `samples` that is not finite or, for class labels and indices, out of range
// (InputBinding::range), as a line for a message; empty when there is none.
std::string find_bad_value(const Dataset& data,
                           const std::vector<InputBinding>& bindings,
                           const std::vector<int64_t>& samples);

// The same of the weights `names`, which may have come with the model; empty when all are finite.
std::string find_bad_weight(const std::vector<std::string>& names,
                            const std::function<Tensor(const std::string&)>& read);

// Throws kNonFinite, naming the step (that of index `step`; of an evaluation, the batch), when
// `value` is not finite.
void require_finite(double value, const std::string& what, int64_t step, bool trains);

}  // namespace trainrt
