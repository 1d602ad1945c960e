// What would change the answer: the search once more with more memory, a larger batch, a host
// fewer.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "planner/planner.h"

namespace trainrt {

// `search` answers a changed request. A change that the pins rule out is reported as such.
std::vector<WhatIf> what_would_change(
    const PlanRequest& request,
    const PlanResult& result,
    const std::function<PlanResult(const PlanRequest& changed)>& search);

}  // namespace trainrt
