// Persistent: weights, gradients and optimizer by ZeRO stage. Stash: what a micro-batch leaves,
// times the micro-batches in flight: m (GPipe), min(p - i, m) (1F1B), (v - 1) p + 2 (p - i - 1) + 1
// virtual stages (interleaved), min(p, m) (zero-bubble H1, whose late weight gradients hold on to
// it). Transient: the largest block's working set, and under full recompute that block's whole
// stash.
#include "planner/step_memory.h"

#include <algorithm>

namespace trainrt {

int stages_in_flight(const Layout& layout, int stage, int m) {
  const int p = layout.pipeline, v = layout.virtual_stages;
  switch (layout.schedule) {
    case ScheduleKind::kGPipe:
      return m;
    case ScheduleKind::kInterleaved:
      if (v > 1) {
        return std::min(m * v, (v - 1) * p + 2 * (p - stage - 1) + 1);
      }
      return std::min(p - stage, m);
    case ScheduleKind::kZeroBubbleH1:
      return std::min(p, m);
    default:
      return std::min(p - stage, m);
  }
}

namespace {

struct Sums {
  double parameters = 0;
  double largest_parameters = 0;
  double stash = 0;  // of all virtual stages of the rank together
  double transient = 0;
  double whole_stash = 0;  // the largest recomputed block's, without recompute
};

Sums sum_stage(const ModelProfile& profile, const Layout& layout, int stage) {
  Sums sums;
  const auto mode = static_cast<size_t>(layout.recompute);
  for (size_t s = static_cast<size_t>(stage); s < layout.first_block.size();
       s += static_cast<size_t>(layout.pipeline)) {
    const int last =
        s + 1 < layout.first_block.size() ? layout.first_block[s + 1] : profile.num_blocks();
    for (int b = layout.first_block[s]; b < last; ++b) {
      const BlockClass& block = profile.block(b);
      sums.parameters += block.parameters - (layout.pipeline == 1 ? block.shared_parameters : 0);
      sums.largest_parameters = std::max(sums.largest_parameters, block.parameters);
      sums.stash += block.stash_bytes[mode];
      sums.transient = std::max(sums.transient, block.transient_bytes);
      if (block.recomputed) {
        sums.whole_stash = std::max(sums.whole_stash, block.stash_bytes[0]);
      }
    }
  }
  return sums;
}

MemoryBreakdown stage_breakdown(const ModelProfile& profile,
                                const Layout& layout,
                                const Engine& engine,
                                int stage) {
  const Sums sums = sum_stage(profile, layout, stage);
  const double d = layout.data;
  const int zero = layout.data > 1 ? layout.zero_stage : 0;
  MemoryBreakdown bytes;
  const auto whole = [](double value) { return static_cast<int64_t>(value); };
  bytes.parameters = whole(engine.weight_bytes * sums.parameters / (zero >= 3 ? d : 1));
  bytes.gradients = whole(engine.gradient_bytes * sums.parameters / (zero >= 2 ? d : 1));
  bytes.optimizer = layout.offload_optimizer
                        ? 0
                        : whole(engine.optimizer_bytes * sums.parameters / (zero >= 1 ? d : 1));
  int most = 0;
  for (const int m : layout.num_micro_batches) {
    most = std::max(most, m);
  }
  const double in_flight = stages_in_flight(layout, stage, most);
  bytes.activations = whole(sums.stash * in_flight / layout.virtual_stages);
  if (layout.recompute != RecomputeMode::kNone) {
    bytes.activations += whole(sums.whole_stash);
  }
  bytes.workspace = whole(sums.transient + engine.library_bytes);
  if (zero >= 3) {  // the running unit, the next one, and a gradient of one unit
    bytes.communication =
        whole(2 * 2 * sums.largest_parameters + engine.reduce_bytes * sums.largest_parameters);
  } else if (layout.pipeline > 1) {
    bytes.communication = whole(4 * profile.block(0).output_bytes);
  }
  if (zero == 1 || zero == 2) {
    bytes.communication += whole(engine.bucket_bytes);
  }
  return bytes;
}

}  // namespace

std::vector<StageMemory> predict_memory(const StepRequest& request) {
  const Layout& layout = *request.layout;
  std::vector<StageMemory> stages;
  for (int stage = 0; stage < layout.pipeline; ++stage) {
    StageMemory memory;
    memory.stage = stage;
    memory.breakdown = stage_breakdown(*request.profile, layout, *request.engine, stage);
    memory.peak_bytes = memory.breakdown.total();
    const int per_stage = layout.data * layout.tensor;
    int64_t least_room = 0;
    for (int i = 0; i < (request.uniform ? 1 : per_stage);
         ++i) {  // the device with the least room decides
      const int device = layout.device(stage * per_stage + i);
      const int64_t capacity = request.topology->capacity_bytes(device);
      const int64_t reserved = request.topology->reserved_bytes(device);
      if (i == 0 || capacity - reserved < least_room) {
        least_room = capacity - reserved;
        memory.capacity_bytes = capacity;
        memory.reserved_bytes = reserved;
        memory.worst_device = device;
      }
    }
    stages.push_back(memory);
  }
  return stages;
}

}  // namespace trainrt
