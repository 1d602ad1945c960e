// What would make an infeasible request fit.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "planner/planner.h"

namespace trainrt {

// Single changes, each tried by a search of its own, as the user would write them.
std::vector<std::string> find_remedies(const PlanRequest& request,
                                       const std::function<PlanResult(const PlanRequest&)>& search);

}  // namespace trainrt
