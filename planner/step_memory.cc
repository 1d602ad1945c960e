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

// interleaved_row() of parallel/schedule deals out forwards, and backwards, in groups of p
// micro-batches, part by part; backwards begin after the warm-up. A part has most in flight when
// its run in a group ends, and after four groups nothing changes any more.
int num_slots(const Layout& layout, int virtual_stage, int m) {
  const int p = layout.pipeline, v = layout.virtual_stages;
  const int rank = virtual_stage % p, part = virtual_stage / p;
  if (layout.schedule != ScheduleKind::kInterleaved) {
    return stages_in_flight(layout, rank, m);
  }
  const int groups = (m + p - 1) / p;
  const int warm_up = std::min(2 * (p - rank - 1) + (v - 1) * p, groups * p * v);
  int most = 0;
  const auto look = [&](int group, int micro_batch) {  // right after its forward
    const int forwards = group * p * v + part * p + micro_batch - group * p;
    const int backwards = std::max(0, forwards - warm_up);
    const int rest = backwards % (p * v) - (v - 1 - part) * p;
    const int done = std::min(backwards / (p * v) * p + std::clamp(rest, 0, p), m);
    most = std::max(most, micro_batch + 1 - done);
  };
  for (int group = 0; group < groups; ++group) {
    if (group < 4 || group + 2 >= groups) {
      look(group, std::min((group + 1) * p, m) - 1);
    }
  }
  return most;
}

namespace {

// What a stage holds at its peak as parallel/memory_plan lays it out. Blocks' activations go one
// after the other in the backward; a block's transients then lie where those of the blocks after it
// were. Gradients stay in accumulators, or, when a step is one micro-batch, are there from the
// backward of their block on.
struct Overlay {
  double activations = 0, gradients = 0, workspace = 0;
  double total() const { return activations + gradients + workspace; }
};

// Of one pipeline rank's blocks.
class StageBytes {
 public:
  StageBytes(const StepRequest& request,
             const std::array<const BlockSums*, 3>& sums,
             const std::vector<int>& slots,
             int num_micro_batches,
             int stage)
      : profile_(*request.profile),
        layout_(*request.layout),
        engine_(*request.engine),
        slots_(slots),
        num_micro_batches_(num_micro_batches),
        stage_(stage) {
    const auto num_stages = layout_.first_block.size();
    const bool copies = layout_.pipeline == 1;  // of parameters that the rank holds anyway
    for (auto s = static_cast<size_t>(stage); s < num_stages;
         s += static_cast<size_t>(layout_.pipeline)) {
      Run run;
      run.sums = sums[static_cast<size_t>(layout_.recompute_of(s))];
      run.first = layout_.first_block[s];
      run.end = s + 1 < num_stages ? layout_.first_block[s + 1] : profile_.num_blocks();
      run.kept = kept(run, run.end);
      run.slots = slots_[s];
      parameters_ += run.sums->parameters(run.first, run.end) -
                     (copies ? run.sums->shared_parameters(run.first, run.end) : 0);
      largest_parameters_ =
          std::max(largest_parameters_, run.sums->largest_parameters(run.first, run.end));
      runs_.push_back(run);
    }
  }

  MemoryBreakdown breakdown() const {
    const double d = layout_.data;
    const int zero = layout_.data > 1 ? layout_.zero_stage : 0;
    MemoryBreakdown bytes;
    const auto whole = [](double value) { return static_cast<int64_t>(value); };
    bytes.parameters = whole(engine_.weight_bytes * parameters_ / (zero >= 3 ? d : 1));
    const bool exact = layout_.exact.exchanged > 0;
    bytes.gradients = whole(engine_.gradient_bytes * parameters_ *
                            (exact ? layout_.exact.held : 1 / (zero >= 2 ? d : 1)));
    bytes.optimizer = layout_.offload_optimizer
                          ? 0
                          : whole(engine_.optimizer_bytes * parameters_ / (zero >= 1 ? d : 1));
    if (engine_.overlays_memory) {
      // By the mean over data ranks: what fits must not hang on how the shares fall.
      const std::vector<int>& counts = layout_.num_micro_batches;
      const bool accumulates =
          exact || std::accumulate(counts.begin(), counts.end(), size_t{0}) > counts.size();
      const Overlay peak = overlay(accumulates);
      bytes.activations = whole(peak.activations);
      bytes.workspace = whole(peak.workspace);
      bytes.gradients = accumulates ? bytes.gradients : whole(peak.gradients);
    } else {
      add_plain(&bytes);
    }
    bytes.workspace += whole(engine_.library_bytes);
    if (zero >= 3) {  // the running unit, the next one, and a gradient of one unit
      bytes.communication =
          whole((2 * engine_.gather_bytes + engine_.reduce_bytes) * largest_parameters_);
    } else if (layout_.pipeline > 1) {
      bytes.communication = whole(4 * profile_.block(0).output_bytes);
    }
    if (exact && layout_.data > 1) {  // of the largest block; each tensor's sum ends them
      bytes.communication +=
          whole(engine_.reduce_bytes * largest_parameters_ * layout_.exact.exchanged);
    } else if (zero == 1 || zero == 2) {
      bytes.communication += whole(engine_.bucket_bytes);
    }
    return bytes;
  }

 private:
  struct Run {  // a virtual stage's blocks
    const BlockSums* sums = nullptr;
    int first = 0, end = 0;
    double kept = 0;  // of one micro-batch
    int slots = 0;
  };

  // By the blocks of a run before `end`. The first stage has no input gradients, which weight
  // gradients could be put off behind.
  double kept(const Run& run, int end) const {
    const bool puts_off =
        layout_.schedule == ScheduleKind::kZeroBubbleH1 && stage_ > 0 && engine_.overlays_memory;
    return run.sums->kept(run.first, end) + (puts_off ? run.sums->put_off(run.first, end) : 0);
  }

  Overlay overlay(bool accumulates) const {
    Overlay peak;
    for (const Run& run : runs_) {
      peak.activations += run.kept * run.slots;
    }
    double held = peak.activations;  // but for what is used up in a step of one micro-batch
    double parameters = 0;           // of the blocks whose gradients are there
    for (size_t i = runs_.size(); i-- > 0;) {
      const Run& run = runs_[i];
      const auto look = [&](int block) {
        Overlay now;
        now.activations = held - run.kept + kept(run, block + 1);
        now.workspace = run.sums->working(block);
        now.gradients = accumulates ? 0 : engine_.gradient_bytes * parameters;
        peak = now.total() > peak.total() ? now : peak;
      };
      if (accumulates) {
        look(run.sums->busiest(run.first, run.end));
      }
      for (int b = run.end - 1; !accumulates && b >= run.first; --b) {
        look(b);
        parameters += profile_.block(b).parameters;
      }
      held -= num_micro_batches_ > 1 ? 0 : run.kept;
    }
    const double gradients = engine_.gradient_bytes * parameters;
    if (!accumulates && gradients > peak.total()) {  // the update waits for the norm of all
      peak = {0, gradients, 0};
    }
    return peak;
  }

  // Activations in flight, and beside them the largest block's needs.
  void add_plain(MemoryBreakdown* bytes) const {
    const double in_flight = stages_in_flight(layout_, stage_, num_micro_batches_);
    double kept = 0, again = 0, transient = 0;
    for (const Run& run : runs_) {
      kept += run.kept;
      again = std::max(again, run.sums->largest_again(run.first, run.end));
      transient = std::max(transient, run.sums->largest_transient(run.first, run.end));
    }
    bytes->activations = static_cast<int64_t>(kept * in_flight / layout_.virtual_stages);
    if (layout_.recompute != RecomputeMode::kNone) {
      bytes->activations += static_cast<int64_t>(again);
    }
    bytes->workspace = static_cast<int64_t>(transient);
  }

  const ModelProfile& profile_;
  const Layout& layout_;
  const Engine& engine_;
  const std::vector<int>& slots_;
  int num_micro_batches_;
  int stage_;
  std::vector<Run> runs_;
  double parameters_ = 0, largest_parameters_ = 0;
};

int most_micro_batches(const Layout& layout) {
  return *std::max_element(layout.num_micro_batches.begin(), layout.num_micro_batches.end());
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
      const int64_t reserved = request.topology->reserved_bytes(device);
      const int64_t capacity =
          reserved + static_cast<int64_t>(
                         static_cast<double>(request.topology->capacity_bytes(device) - reserved) /
                         request.memory_error);
      if (i == 0 || capacity - reserved < least_room) {
        least_room = capacity - reserved;
        room.capacity_bytes = capacity;
        room.reserved_bytes = reserved;
        room.rank = stage * per_stage + i;
      }
    }
    rooms_.push_back(room);
  }
  for (size_t s = 0; s <= layout.stage_recompute.size(); ++s) {
    const RecomputeMode mode =
        s == layout.stage_recompute.size() ? layout.recompute : layout.stage_recompute[s];
    const auto key = std::make_pair(request.profile, mode);
    auto found = cache().sums.find(key);
    if (found == cache().sums.end()) {
      found = cache().sums.emplace(key, BlockSums(*request.profile, mode)).first;
    }
    sums_[static_cast<size_t>(mode)] = &found->second;
  }
}

const std::vector<int>& StageMemories::slots(int num_micro_batches) const {
  const Layout& layout = *request_.layout;
  const std::array<int, 4> key = {
      static_cast<int>(layout.schedule), layout.pipeline, num_micro_batches, layout.virtual_stages};
  std::vector<int>& found = cache().slots[key];
  if (found.empty()) {
    for (int s = 0; s < layout.pipeline * layout.virtual_stages; ++s) {
      found.push_back(num_slots(layout, s, num_micro_batches));
    }
  }
  return found;
}

StageMemory StageMemories::of(int stage) const {
  StageMemory memory = rooms_[static_cast<size_t>(stage)];
  const int m = most_micro_batches(*request_.layout);
  memory.breakdown = StageBytes(request_, sums_, slots(m), m, stage).breakdown();
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
  const bool exact = layout.exact.exchanged > 0;
  const double gradients = exact                   ? layout.exact.held
                           : num_micro_batches > 1 ? 1 / (zero >= 2 ? d : 1)
                                                   : 0;
  const double per_element =
      engine.weight_bytes / (zero >= 3 ? d : 1) + engine.gradient_bytes * gradients +
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
