// What `eval` prints.
#pragma once

#include <string>

#include "runtime/executor.h"

namespace trainrt {

// "loss: X" and, for class labels, "accuracy: 0.xxxx"; or one JSON object.
std::string eval_result(const StepResult& sum, bool json);

}  // namespace trainrt
