// What every rank of a plan allocates, and what it does: from its compiled program and that
// program's memory plan, which are what `run` executes. To the byte, for an equal DeviceSpec.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "parallel/memory_plan.h"
#include "parallel/partition.h"
#include "planner/rank_work.h"

namespace trainrt {

struct RankMemory {
  int64_t peak_bytes = 0;
  MemoryBreakdown breakdown;  // sums to peak_bytes
  // What it does in a step, where that was asked for: ranks alike share it.
  std::shared_ptr<const RankWork> work;
};

// What a rank's memory is put together from.
struct RankParts {
  std::vector<PersistentTensor> persistent;
  MemoryPlan plan;  // without addresses
  int num_micro_batches = 0;
};

class ProgramMemory {
 public:
  // Whether a report can wait for it: always for what CPUs will run, unless it is huge; for GPUs
  // where it takes some 0.1 s. Compiling takes time with the nodes of the training graph and the
  // kinds of ranks (ResNet-50 in two kinds: 0.2 s; GPT-3 on 8 stages in four: 16 s).
  static bool is_quick(const Plan& plan, int num_nodes, const DeviceSpec& device);

  // `device`: the spec of each rank's device. `cost`: by what each rank's work is priced; it
  // answers null, or is null, where that is not wanted. `prepare`: changes a program before its
  // memory is planned.
  ProgramMemory(TrainingGraphFactory factory,
                const Plan& plan,
                std::function<DeviceSpec(int rank)> device,
                std::function<const CostModel*(int rank)> cost = nullptr,
                std::function<void(Program*)> prepare = nullptr);
  ~ProgramMemory();

  // By rank. Equal ranks form classes, of which one is compiled.
  std::vector<RankMemory> all();
  // The reference is the same for equal ranks.
  const RankParts& parts(int rank);
  int num_compiled() const { return num_compiled_; }

 private:
  struct RankClass;
  const RankClass& class_of(int rank);
  bool is_alike(const RankClass& known, int rank) const;

  Partitioner partitioner_;
  std::function<DeviceSpec(int rank)> device_;
  std::function<const CostModel*(int rank)> cost_;
  std::function<void(Program*)> prepare_;
  std::vector<int> share_class_;  // by data rank: those of one class have equal micro-batches
  std::vector<std::unique_ptr<RankClass>> classes_;
  int num_compiled_ = 0;
};

}  // namespace trainrt
