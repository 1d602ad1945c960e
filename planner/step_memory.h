// Bytes of each pipeline rank, in closed form from the profile: what the search prunes by. The
// final figures come from the programs' memory plan.
#pragma once

#include "planner/program_memory.h"
#include "planner/step_cost.h"

namespace trainrt {

// Most micro-batches in flight on the rank's virtual stages together, in units of one virtual
// stage.
int stages_in_flight(const Layout& layout, int stage, int num_micro_batches);

// The same of one virtual stage: slots for its activations (Program::num_stash_slots).
int num_slots(const Layout& layout, int virtual_stage, int num_micro_batches);

// Memory of single pipeline ranks of request.layout, whose cuts may change between calls.
class StageMemories {
 public:
  explicit StageMemories(const StepRequest& request);
  StageMemory of(int stage) const;
  // No cut fits, whatever the shares: told from what each block adds at least to a rank that holds
  // it. May be false where no cut fits either.
  bool proven_too_large(int num_micro_batches) const;

 private:
  PriceCache& cache() const { return request_.cache != nullptr ? *request_.cache : own_; }
  const std::vector<int>& slots(int num_micro_batches) const;

  const StepRequest& request_;
  mutable PriceCache own_;
  std::array<const BlockSums*, 3> sums_ = {};  // by RecomputeMode, where the layout has it
  std::vector<StageMemory> rooms_;  // capacity and reserve of each stage's tightest device
};

// Of each pipeline rank, the device that is nearest to its limit.
std::vector<StageMemory> stages_of_ranks(const std::vector<RankMemory>& ranks,
                                         const Topology& topology,
                                         const Layout& layout);

}  // namespace trainrt
