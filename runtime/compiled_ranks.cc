#include "runtime/compiled_ranks.h"

#include <algorithm>

#include "parallel/partition.h"
#include "runtime/plan_choice.h"

namespace trainrt {

const std::vector<MicroBatch>& CompiledRank::micro_batches(int64_t num_samples) const {
  const auto at = program_of_size.find(num_samples);
  TRAINRT_CHECK(at != program_of_size.end(), "no program for a step of ", num_samples, " samples");
  return programs[static_cast<size_t>(at->second)]->micro_batches;
}

int64_t CompiledRank::arena_bytes() const {
  int64_t bytes = 0;
  for (const MemoryPlan& memory : memories) {
    bytes = std::max(bytes, memory.arena_bytes);
  }
  return bytes;
}

std::vector<CompiledRank> compile_ranks(const TrainingJob& job,
                                        const Plan& plan,
                                        const std::vector<DeviceOptions>& devices,
                                        const std::vector<int64_t>& sizes,
                                        std::optional<int> only_rank) {
  const ShapedGraphFactory factory = [&job](const MicroBatchShape& shape, bool accumulate) {
    return job.build(shape, accumulate);
  };
  std::vector<CompiledRank> ranks(devices.size());
  const auto compile = [&](Partitioner& partitioner, const std::vector<int64_t>& for_sizes) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (only_rank && *only_rank != static_cast<int>(rank)) {
        continue;
      }
      const DeviceSpec spec = device_spec(devices[rank]);
      auto program =
          std::make_shared<const Program>(partitioner.program(static_cast<int>(rank), spec));
      for (const int64_t size : for_sizes) {
        ranks[rank].program_of_size[size] = static_cast<int>(ranks[rank].programs.size());
      }
      ranks[rank].memories.push_back(plan_memory(*program));
      ranks[rank].programs.push_back(std::move(program));
    }
  };
  if (job.token_batches) {
    // One program for steps of every size: they differ in their micro-batches anyway.
    Partitioner partitioner(factory, plan, job.token_batches->shapes());
    compile(partitioner, sizes);
    return ranks;
  }
  for (const int64_t size : sizes) {
    Partitioner partitioner(
        [&](int64_t micro_batch, bool accumulate) {
          return factory({micro_batch, 0}, accumulate);
        },
        resize_plan(plan, size));
    compile(partitioner, {size});
  }
  return ranks;
}

}  // namespace trainrt
