// Persistent: weights, gradients and optimizer by ZeRO stage. Stash: what a micro-batch leaves,
// times the micro-batches in flight: m (GPipe), min(p - i, m) (1F1B), (v - 1) p + 2 (p - i - 1) + 1
// virtual stages (interleaved), min(p, m) (zero-bubble H1, whose late weight gradients hold on to
// it). Transient: the largest block's working set, and under full recompute that block's whole
// stash.
#include "planner/step_memory.h"

#include <algorithm>
#include <numeric>

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
  for (size_t s = static_cast<size_t>(stage); s < layout.first_block.size();
       s += static_cast<size_t>(layout.pipeline)) {
    const auto mode = static_cast<size_t>(layout.recompute_of(s));
    const int last =
        s + 1 < layout.first_block.size() ? layout.first_block[s + 1] : profile.num_blocks();
    for (int b = layout.first_block[s]; b < last; ++b) {
      const BlockClass& block = profile.block(b);
      sums.parameters += block.parameters - (layout.pipeline == 1 ? block.shared_parameters : 0);
      sums.largest_parameters = std::max(sums.largest_parameters, block.parameters);
      sums.stash += block.stash_bytes[mode];
      sums.transient = std::max(sums.transient, block.transient_bytes);
      if (block.recomputed && mode != 0) {
        sums.whole_stash = std::max(sums.whole_stash, block.stash_bytes[0]);
      }
    }
  }
  return sums;
}

// What a stage holds at its peak as parallel/memory_plan lays it out. Blocks' activations go one
// after the other in the backward; a block's transients then lie where those of the blocks after it
// were. Gradients stay in accumulators, or, when a step is one micro-batch, are there from the
// backward of their block on.
struct Overlay {
  double activations = 0, gradients = 0, workspace = 0;
  double total() const { return activations + gradients + workspace; }
};

Overlay overlay_stage(const ModelProfile& profile,
                      const Layout& layout,
                      const Engine& engine,
                      int stage,
                      double stash,
                      double in_flight,
                      bool accumulates) {
  // Other micro-batches in flight: whole slots.
  const double others = stash * (in_flight / layout.virtual_stages - 1);
  Overlay peak;
  double before = stash;  // activations not yet used up
  double parameters = 0;
  for (auto s = static_cast<int>(layout.first_block.size()) - layout.pipeline + stage; s >= 0;
       s -= layout.pipeline) {
    const auto at = static_cast<size_t>(s);
    const RecomputeMode mode = layout.recompute_of(at);
    const int end =
        at + 1 < layout.first_block.size() ? layout.first_block[at + 1] : profile.num_blocks();
    for (int b = end - 1; b >= layout.first_block[at]; --b) {
      const BlockClass& block = profile.block(b);
      const double own = block.stash_bytes[static_cast<size_t>(mode)];
      Overlay now;
      now.activations = std::max(0.0, others) + before;
      now.workspace = block.transient_bytes;
      if (mode != RecomputeMode::kNone && block.recomputed) {
        now.workspace += std::max(0.0, block.stash_bytes[0] - own);
      }
      now.gradients = accumulates ? 0 : engine.gradient_bytes * parameters;
      if (now.total() > peak.total()) {
        peak = now;
      }
      before -= own;
      parameters += block.parameters;
    }
  }
  const double gradients = engine.gradient_bytes * parameters;
  if (!accumulates && gradients > peak.total()) {  // the update waits for the norm of all
    peak = {0, gradients, 0};
  }
  return peak;
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
  if (engine.overlays_memory) {
    // By the mean over data ranks: what fits must not hang on how the shares fall.
    const std::vector<int>& counts = layout.num_micro_batches;
    const bool accumulates =
        std::accumulate(counts.begin(), counts.end(), size_t{0}) > counts.size();
    const Overlay peak =
        overlay_stage(profile, layout, engine, stage, sums.stash, in_flight, accumulates);
    bytes.activations = whole(peak.activations);
    bytes.workspace = whole(peak.workspace);
    bytes.gradients = accumulates ? bytes.gradients : whole(peak.gradients);
  } else {
    bytes.activations = whole(sums.stash * in_flight / layout.virtual_stages);
    if (layout.recompute != RecomputeMode::kNone) {
      bytes.activations += whole(sums.whole_stash);
    }
    bytes.workspace = whole(sums.transient);
  }
  bytes.workspace += whole(engine.library_bytes);
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

std::vector<StageMemory> stages_of_ranks(const std::vector<RankMemory>& ranks,
                                         const Topology& topology,
                                         const Layout& layout) {
  std::vector<StageMemory> stages(static_cast<size_t>(layout.pipeline));
  const int per_stage = layout.data * layout.tensor;
  for (int rank = 0; rank < layout.world_size(); ++rank) {
    const RankMemory& own = ranks[static_cast<size_t>(rank)];
    const int device = layout.device(rank);
    StageMemory memory;
    memory.stage = rank / per_stage;
    memory.rank = rank;
    memory.breakdown = own.breakdown;
    memory.peak_bytes = own.peak_bytes;
    memory.capacity_bytes = topology.capacity_bytes(device);
    memory.reserved_bytes = topology.reserved_bytes(device);
    StageMemory& stage = stages[static_cast<size_t>(memory.stage)];
    if (rank % per_stage == 0 || memory.missing_bytes() > stage.missing_bytes()) {
      stage = memory;
    }
  }
  return stages;
}

StageMemories::StageMemories(const StepRequest& request) : request_(request) {
  const Layout& layout = *request.layout;
  const int per_stage = layout.data * layout.tensor;
  for (int stage = 0; stage < layout.pipeline; ++stage) {
    StageMemory room;
    room.stage = stage;
    int64_t least_room = 0;
    for (int i = 0; i < (request.uniform ? 1 : per_stage);
         ++i) {  // the device with the least room decides
      const int device = layout.device(stage * per_stage + i);
      const int64_t capacity = request.topology->capacity_bytes(device);
      const int64_t reserved = request.topology->reserved_bytes(device);
      if (i == 0 || capacity - reserved < least_room) {
        least_room = capacity - reserved;
        room.capacity_bytes = capacity;
        room.reserved_bytes = reserved;
        room.rank = stage * per_stage + i;
      }
    }
    rooms_.push_back(room);
  }
}

StageMemory StageMemories::of(int stage) const {
  StageMemory memory = rooms_[static_cast<size_t>(stage)];
  memory.breakdown = stage_breakdown(*request_.profile, *request_.layout, *request_.engine, stage);
  memory.peak_bytes = memory.breakdown.total();
  return memory;
}

// Let a block add a_r to rank r, which has room R_r, and l_r >= 0 be any weights. If a cut fits,
// then sum over blocks of min over r of l_r a_r <= sum_r l_r R_r. The weights make a block of
// average size count alike on every rank: l_r = 1 / (its a_r).
bool StageMemories::proven_too_large(int num_micro_batches) const {
  const ModelProfile& profile = *request_.profile;
  const Layout& layout = *request_.layout;
  const Engine& engine = *request_.engine;
  const double d = layout.data;
  const int zero = layout.data > 1 ? layout.zero_stage : 0;
  const double per_element =
      engine.weight_bytes / (zero >= 3 ? d : 1) +
      (num_micro_batches > 1 ? engine.gradient_bytes / (zero >= 2 ? d : 1) : 0) +
      (layout.offload_optimizer ? 0 : engine.optimizer_bytes / (zero >= 1 ? d : 1));
  const auto mode = static_cast<size_t>(layout.recompute);
  std::vector<double> count(profile.classes.size(), 0);
  for (const int block : profile.blocks) {
    count[static_cast<size_t>(block)] += 1;
  }
  const auto added = [&](size_t c, int rank) {
    const BlockClass& block = profile.classes[c];
    const double own = block.parameters - (layout.pipeline == 1 ? block.shared_parameters : 0);
    const double in_flight = stages_in_flight(layout, rank, num_micro_batches);
    return per_element * own + block.stash_bytes[mode] * in_flight / layout.virtual_stages;
  };
  double room = 0;
  std::vector<double> least(count.size(), 1e300);
  for (int rank = 0; rank < layout.pipeline; ++rank) {
    double sum = 0;
    for (size_t c = 0; c < count.size(); ++c) {
      sum += count[c] * added(c, rank);
    }
    const double weight = static_cast<double>(profile.num_blocks()) / sum;
    const StageMemory& own = rooms_[static_cast<size_t>(rank)];
    room += weight * static_cast<double>(own.capacity_bytes - own.reserved_bytes);
    for (size_t c = 0; c < count.size(); ++c) {
      least[c] = std::min(least[c], weight * added(c, rank));
    }
  }
  double needed = 0;
  for (size_t c = 0; c < count.size(); ++c) {
    needed += count[c] * least[c];
  }
  return needed > room * (1 + 1e-9);
}

std::vector<StageMemory> predict_memory(const StepRequest& request) {
  const StageMemories memories(request);
  std::vector<StageMemory> stages;
  for (int stage = 0; stage < request.layout->pipeline; ++stage) {
    stages.push_back(memories.of(stage));
  }
  return stages;
}

}  // namespace trainrt
