// Programs and memory plans of this process's ranks, for every size of step that occurs.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "parallel/memory_plan.h"
#include "parallel/plan.h"
#include "parallel/program.h"
#include "runtime/device.h"
#include "runtime/training_job.h"

namespace trainrt {

struct CompiledRank {
  std::vector<std::shared_ptr<const Program>> programs;
  std::vector<MemoryPlan> memories;
  std::map<int64_t, int> program_of_size;  // samples of a step -> index of its program

  const std::vector<MicroBatch>& micro_batches(int64_t num_samples) const;
  int64_t arena_bytes() const;
};

// `sizes`: numbers of samples of a step, the plan's own first. With `only_rank` the others of the
// result stay empty.
std::vector<CompiledRank> compile_ranks(const TrainingJob& job,
                                        const Plan& plan,
                                        const std::vector<DeviceOptions>& devices,
                                        const std::vector<int64_t>& sizes,
                                        std::optional<int> only_rank);

}  // namespace trainrt
