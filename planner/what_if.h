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
  bool allows_the_plan = false;  // what fitted fits still
};
std::vector<Change> changes_to_try(const PlanRequest& request);

// A plan uses all devices. Requests for fewer of them, the fastest or of one host, which might take
// less time where `result` spends much of it waiting.
std::vector<Change> fewer_devices_to_try(const PlanRequest& request, const PlanResult& result);

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
