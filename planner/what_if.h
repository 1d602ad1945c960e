// What would change the answer: the same search for a request that differs in one thing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/base/error.h"
#include "planner/planner.h"

namespace trainrt {

// One thing that is different.
struct Change {
  std::string name;
  PlanRequest request;
};
std::vector<Change> changes_to_try(const PlanRequest& request);

// What the search answered; an error where the change is ruled out by what is pinned.
struct ChangedAnswer {
  PlanResult result;
  std::optional<Error> error;
};

// In comparison with what `request` was answered.
WhatIf what_came_of(const Change& change,
                    const ChangedAnswer& answer,
                    const PlanRequest& request,
                    const PlanResult& result);

}  // namespace trainrt
