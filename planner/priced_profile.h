// A model's block classes priced on one device type and tensor group, phase by phase.
#pragma once

#include <array>
#include <vector>

#include "planner/collective_cost.h"
#include "planner/cost_model.h"
#include "planner/engine.h"
#include "planner/model_profile.h"
#include "planner/simulator.h"

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

// Blocks that run one after the other.
struct PricedRun {
  StageTimes times;          // with what runs again
  double communication = 0;  // of forward and backward together, in `times`
};

class PricedProfile {
 public:
  // `tensor_group`: links of a tensor group. `launch_seconds`: host time per kernel.
  PricedProfile(const ModelProfile& profile,
                const CostModel& cost,
                const GroupLinks& tensor_group,
                const Engine& engine);
  const PricedClass& of_class(int index) const { return classes_[static_cast<size_t>(index)]; }
  // A block of a class under a recompute.
  const PricedRun& block(int index, RecomputeMode mode) const {
    return blocks_[static_cast<size_t>(mode)][static_cast<size_t>(index)];
  }
  // Blocks [first, end).
  PricedRun run(int first, int end, RecomputeMode mode) const;

 private:
  std::vector<PricedClass> classes_;
  // By recompute: of each class, and of the blocks before each of the chain.
  std::array<std::vector<PricedRun>, 3> blocks_, before_;
};

}  // namespace trainrt
