// Bytes of each pipeline rank, in closed form from the profile: what the search prunes by. The
// final figures come from the programs' memory plan.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "planner/program_memory.h"
#include "planner/step_cost.h"

namespace trainrt {

// Most micro-batches in flight on the rank's virtual stages together, in units of one virtual
// stage.
int stages_in_flight(const Layout& layout, int stage, int num_micro_batches);

// The same of one virtual stage: slots for its activations (Program::num_stash_slots).
int num_slots(const Layout& layout, int virtual_stage, int num_micro_batches);

// What more a block frees when it runs again, and takes, than under the kind of recompute before.
struct RecomputeStep {
  RecomputeMode mode = RecomputeMode::kNone;
  double bytes = 0, seconds = 0;
};
// For a class of block that takes `seconds`, by RecomputeMode: those that free most for their time
// first; each pays more for a byte than the one before.
std::vector<RecomputeStep> recompute_steps(const BlockClass& block,
                                           const std::array<double, 3>& seconds);

struct StageRuns;

// Memory of single pipeline ranks of request.layout, whose cuts may change between calls. For one
// thread.
class StageMemories {
 public:
  explicit StageMemories(const StepRequest& request);
  StageMemories(StageMemories&& other) noexcept;
  ~StageMemories();
  StageMemory of(int stage) const;
  // No cut fits, whatever the shares: told from what each block adds at least to a rank that holds
  // it. May be false where no cut fits either.
  bool proven_too_large(int num_micro_batches) const;
  // Seconds that what runs again takes at least for a micro-batch, on all ranks together, such that
  // some cut fits. `seconds`: of each class of block, by RecomputeMode.
  double least_seconds_again(int num_micro_batches,
                             const std::array<std::vector<double>, 3>& seconds) const;

 private:
  // Data ranks whose micro-batches are of one size.
  struct Group {
    const ModelProfile* profile = nullptr;
    std::vector<int> data_ranks;                // empty: all
    std::array<const BlockSums*, 3> sums = {};  // by RecomputeMode, where the layout has it
    std::vector<StageMemory> rooms;  // capacity and reserve of each stage's tightest device
  };

  PriceCache& cache() const { return request_.cache != nullptr ? *request_.cache : own_; }
  const std::vector<int>& slots(int num_micro_batches) const;
  void add_group(std::vector<int> data_ranks);
  StageMemory of(const Group& group, int stage) const;
  bool proven_too_large(const Group& group, int num_micro_batches) const;
  double weighted_shortage(const Group& group,
                           int num_micro_batches,
                           const std::vector<double>& kept,
                           double error,
                           double* freed) const;

  const StepRequest& request_;
  mutable PriceCache own_;
  mutable int slots_of_ = 0;  // micro-batches, that were last asked for
  mutable const std::vector<int>* known_slots_ = nullptr;
  std::vector<Group> groups_;
  std::unique_ptr<StageRuns> runs_;
};

// What the rank's device keeps from the plan: for context, kernels and libraries, and on a GPU for
// communicators (parallel/communicator_memory).
int64_t reserved_bytes(const Topology& topology, const Layout& layout, int device);

// Of each pipeline rank, the device that is nearest to its limit.
std::vector<StageMemory> stages_of_ranks(const std::vector<RankMemory>& ranks,
                                         const Topology& topology,
                                         const Layout& layout);

}  // namespace trainrt
