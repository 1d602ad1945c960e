// The plan that somebody has written down: in a --plan file, or as annotations of the model.
#pragma once

#include <optional>
#include <set>
#include <string>

#include "graph/onnx_import.h"
#include "parallel/plan.h"
#include "planner/plan_pins.h"
#include "runtime/options.h"

namespace trainrt {

// --plan's word for no plan, not even the one that the model carries.
inline constexpr const char* kNoPlan = "none";

struct GivenPlan {
  Plan plan;
  std::set<std::string> stated;  // its keys; what is not among them is open
  std::string where;             // "--plan 'p.json'"

  // Does it leave nothing to the planner?
  bool is_whole() const;
};

// The file of --plan, if there is one. Throws kInvalidArgument naming file, key and value.
std::optional<GivenPlan> plan_file(const Options& options);

// The plan that the model carries, unless --plan says anything.
std::optional<GivenPlan> carried_plan(const Options& options, const OnnxModel& model);

// What a plan says of the problem itself (batch, precision, dims) and of how sums are formed,
// rather than of the split: taken over where no flag says it. Throws kInvalidArgument with both
// figures where a flag says otherwise.
Options follow_plan(Options options, const GivenPlan& given);

// Adds the plan to what the flags have fixed. Throws kInvalidArgument when it is made for another
// model, or contradicts a flag, itself or the cluster.
void pin_given_plan(const GivenPlan& given,
                    const std::string& model_hash,
                    const Topology& topology,
                    PlanPins* pins);

}  // namespace trainrt
