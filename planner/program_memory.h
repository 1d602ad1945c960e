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
  // What compiling takes time with: the nodes of the training graph, once for each kind of rank
  // (ResNet-50 in four kinds: 0.2 s on two cores).
  static int64_t work(const Plan& plan, int num_nodes);

  // `device`: the spec of each rank's device. `cost`: by what each rank's work is priced; it
  // answers null, or is null, where that is not wanted. `prepare`: changes a program before its
  // memory is planned. All are called from several threads.
  ProgramMemory(const TrainingGraphFactory& factory,
                const Plan& plan,
                std::function<DeviceSpec(int rank)> device,
                std::function<const CostModel*(int rank)> cost = nullptr,
                std::function<void(Program*)> prepare = nullptr);
  ~ProgramMemory();

  // Compiles for all ranks. Equal ranks form classes, of which one is compiled.
  void compile();
  std::vector<RankMemory> all();  // by rank; compiles
  // The reference is the same for equal ranks.
  const RankParts& parts(int rank);

 private:
  struct RankClass;
  struct Group;
  std::unique_ptr<RankClass> make_class(int rank);
  bool is_alike(const RankClass& known, int rank) const;

  const Plan plan_;
  std::function<DeviceSpec(int rank)> device_;
  std::function<const CostModel*(int rank)> cost_;
  std::function<void(Program*)> prepare_;
  std::vector<int> share_class_;  // by data rank: those of one class have equal micro-batches
  Partitioner partitioner_;
  std::vector<std::unique_ptr<RankClass>> classes_;
  std::vector<const RankClass*> class_of_;  // by rank
};

}  // namespace trainrt
