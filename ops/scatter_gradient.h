// The gradient of ScatterElements and ScatterND, which differ only in how they address.
#pragma once

#include <functional>
#include <string>

#include "graph/autodiff.h"

namespace trainrt {

// How the operator at hand reads and writes the places that its indices (input 1) name.
struct ScatterAddressing {
  std::function<ValueId(ValueId from)> gather;
  std::function<ValueId(ValueId data, ValueId updates, const std::string& reduction)> scatter;
};

// For data (input 0) and updates (input 2), by attribute `reduction`: none, add, mul, max or min.
void scatter_gradient(GradientBuilder& g, const ScatterAddressing& at);

}  // namespace trainrt
