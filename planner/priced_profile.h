// A model's block classes priced on one device type and tensor group, phase by phase.
#pragma once

#include <vector>

#include "planner/collective_cost.h"
#include "planner/cost_model.h"
#include "planner/engine.h"
#include "planner/model_profile.h"

namespace trainrt {

// Seconds of a block class on one device type.
struct PricedPhase {
  double compute = 0;
  double communication = 0;  // exposed tensor collectives
  double total() const { return compute + communication; }
};
struct PricedClass {
  PricedPhase forward, input_grad, weight_grad, selective;
};

class PricedProfile {
 public:
  // `tensor_group`: links of a tensor group. `launch_seconds`: host time per kernel.
  PricedProfile(const ModelProfile& profile,
                const CostModel& cost,
                const GroupLinks& tensor_group,
                const Engine& engine);
  const PricedClass& of_class(int index) const { return classes_[static_cast<size_t>(index)]; }

 private:
  std::vector<PricedClass> classes_;
};

}  // namespace trainrt
