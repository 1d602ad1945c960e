// Persistent: weights, gradients and optimizer by ZeRO stage. Stash: what a micro-batch leaves,
// times the micro-batches in flight: m (GPipe), min(p - i, m) (1F1B), (v - 1) p + 2 (p - i - 1) + 1
// virtual stages (interleaved), min(p, m) (zero-bubble H1, whose late weight gradients hold on to
// it). Transient: the largest block's working set, and under full recompute that block's whole
// stash.
#include "planner/step_memory.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "parallel/communicator_memory.h"

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

// A pipeline rank's blocks.
struct StageRuns {
  struct Run {  // under one kind of recompute
    const BlockSums* sums = nullptr;
    int first = 0, end = 0;
    double kept = 0;  // of one micro-batch
  };
  struct Stage {  // a virtual one's
    int first = 0, end = 0;
    size_t first_run = 0, end_run = 0;
    double kept = 0;  // of one micro-batch
    int slots = 0;
  };
  std::vector<Stage> stages;
  std::vector<Run> runs;
};

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
  // `memory`: room to work in, which the search would else allocate a million times.
  StageBytes(const StepRequest& request,
             const ModelProfile& profile,
             const std::array<const BlockSums*, 3>& sums,
             const std::vector<int>& slots,
             int num_micro_batches,
             int stage,
             StageRuns* memory)
      : profile_(profile),
        layout_(*request.layout),
        engine_(*request.engine),
        slots_(slots),
        num_micro_batches_(num_micro_batches),
        stage_(stage),
        stages_(memory->stages),
        runs_(memory->runs) {
    stages_.clear();
    runs_.clear();
    const auto num_stages = layout_.first_block.size();
    const bool copies = layout_.pipeline == 1;  // of parameters that the rank holds anyway
    for (auto s = static_cast<size_t>(stage); s < num_stages;
         s += static_cast<size_t>(layout_.pipeline)) {
      StageRuns::Stage own;
      own.first = layout_.first_block[s];
      own.end = s + 1 < num_stages ? layout_.first_block[s + 1] : profile_.num_blocks();
      own.first_run = runs_.size();
      for (int b = own.first, end = 0; b < own.end; b = end) {
        end = layout_.end_of_recompute(b, own.end);
        const RecomputeMode mode = layout_.recompute_of(b);
        strongest_ = std::max(strongest_, mode);
        StageRuns::Run run{sums[static_cast<size_t>(mode)], b, end, 0};
        run.kept = kept(run, end);
        own.kept += run.kept;
        runs_.push_back(run);
      }
      own.end_run = runs_.size();
      own.slots = slots_[s];
      const BlockSums& any = *runs_.back().sums;
      parameters_ += any.parameters(own.first, own.end) -
                     (copies ? any.shared_parameters(own.first, own.end) : 0);
      largest_parameters_ =
          std::max(largest_parameters_, any.largest_parameters(own.first, own.end));
      stages_.push_back(own);
    }
  }

  // Of all blocks.
  RecomputeMode strongest_recompute() const { return strongest_; }

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
          exact || std::accumulate(counts.begin(), counts.end(), size_t{0}) > counts.size() ||
          (layout_.tensor > 1 && !layout_.micro_batch_sizes.empty());
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
  // By the blocks of a run before `end`. The first stage has no input gradients, which weight
  // gradients could be put off behind.
  double kept(const StageRuns::Run& run, int end) const {
    const bool puts_off =
        layout_.schedule == ScheduleKind::kZeroBubbleH1 && stage_ > 0 && engine_.overlays_memory;
    return run.sums->kept(run.first, end) + (puts_off ? run.sums->put_off(run.first, end) : 0);
  }

  Overlay overlay(bool accumulates) const {
    Overlay peak;
    for (const StageRuns::Stage& stage : stages_) {
      peak.activations += stage.kept * stage.slots;
    }
    double held = peak.activations;  // but for what is used up in a step of one micro-batch
    double parameters = 0;           // of the blocks whose gradients are there
    for (size_t s = stages_.size(); s-- > 0;) {
      const StageRuns::Stage& stage = stages_[s];
      double before = stage.kept;  // by the runs before, of the micro-batch in its backward
      for (size_t i = stage.end_run; i-- > stage.first_run;) {
        const StageRuns::Run& run = runs_[i];
        before -= run.kept;
        const auto look = [&](int block) {
          Overlay now;
          now.activations = held - stage.kept + before + kept(run, block + 1);
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
      }
      held -= num_micro_batches_ > 1 ? 0 : stage.kept;
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
    for (const StageRuns::Run& run : runs_) {
      kept += run.kept;
      again = std::max(again, run.sums->largest_again(run.first, run.end));
      transient = std::max(transient, run.sums->largest_transient(run.first, run.end));
    }
    bytes->activations = static_cast<int64_t>(kept * in_flight / layout_.virtual_stages);
    bytes->activations += static_cast<int64_t>(again);
    bytes->workspace = static_cast<int64_t>(transient);
  }

  const ModelProfile& profile_;
  const Layout& layout_;
  const Engine& engine_;
  const std::vector<int>& slots_;
  int num_micro_batches_;
  int stage_;
  std::vector<StageRuns::Stage>& stages_;
  std::vector<StageRuns::Run>& runs_;
  RecomputeMode strongest_ = RecomputeMode::kNone;
  double parameters_ = 0, largest_parameters_ = 0;
};

}  // namespace

int64_t reserved_bytes(const Topology& topology, const Layout& layout, int device) {
  const int64_t communicators =
      topology.type_of(device).is_cpu()
          ? 0
          : communicator_bytes(layout.data, layout.tensor, layout.pipeline);
  return topology.reserved_bytes(device) + communicators;
}

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
    memory.reserved_bytes = reserved_bytes(topology, layout, device);
    StageMemory& stage = stages[static_cast<size_t>(memory.stage)];
    if (rank % per_stage == 0 || memory.missing_bytes() > stage.missing_bytes()) {
      stage = memory;
    }
  }
  return stages;
}

StageMemories::StageMemories(const StepRequest& request)
    : request_(request), runs_(std::make_unique<StageRuns>()) {
  const Layout& layout = *request.layout;
  if (layout.micro_batch_sizes.empty()) {
    add_group({});
    return;
  }
  std::map<int64_t, std::vector<int>, std::greater<>> by_size;
  for (int d = 0; d < layout.data; ++d) {
    by_size[layout.micro_batch_size(d)].push_back(d);
  }
  for (auto& [size, data_ranks] : by_size) {
    add_group(std::move(data_ranks));
  }
}

void StageMemories::add_group(std::vector<int> data_ranks) {
  const StepRequest& request = request_;
  const Layout& layout = *request.layout;
  Group& group = groups_.emplace_back();
  group.data_ranks = std::move(data_ranks);
  group.profile =
      group.data_ranks.empty() ? request.profile : &request.profile_of(group.data_ranks[0]);
  for (int stage = 0; stage < layout.pipeline; ++stage) {
    StageMemory room;
    room.stage = stage;
    int64_t least_room = 0;
    bool is_first = true;
    const auto look = [&](int rank) {  // the device with the least room decides
      const int device = layout.device(rank);
      const int64_t reserved = reserved_bytes(*request.topology, layout, device);
      const int64_t capacity = request.topology->capacity_bytes(device);
      if (is_first || capacity - reserved < least_room) {
        least_room = capacity - reserved;
        room.capacity_bytes = capacity;
        room.reserved_bytes = reserved;
        room.rank = rank;
        is_first = false;
      }
    };
    const int ranks =
        group.data_ranks.empty() ? layout.data : static_cast<int>(group.data_ranks.size());
    for (int i = 0; i < (request.uniform ? 1 : ranks); ++i) {
      const int d = group.data_ranks.empty() ? i : group.data_ranks[static_cast<size_t>(i)];
      for (int t = 0; t < (request.uniform ? 1 : layout.tensor); ++t) {
        look((stage * layout.data + d) * layout.tensor + t);
      }
    }
    group.rooms.push_back(room);
  }
  const bool may_mix = layout.recompute_as_needed || !layout.block_recompute.empty();
  for (const RecomputeMode mode :
       {RecomputeMode::kNone, RecomputeMode::kSelective, RecomputeMode::kFull}) {
    if (!may_mix && mode != layout.recompute) {
      continue;
    }
    const auto key = std::make_pair(group.profile, mode);
    auto found = cache().sums.find(key);
    if (found == cache().sums.end()) {
      found = cache().sums.emplace(key, BlockSums(*group.profile, mode)).first;
    }
    group.sums[static_cast<size_t>(mode)] = &found->second;
  }
}

const std::vector<int>& StageMemories::slots(int num_micro_batches) const {
  if (known_slots_ != nullptr && slots_of_ == num_micro_batches) {
    return *known_slots_;
  }
  const Layout& layout = *request_.layout;
  const std::array<int, 4> key = {
      static_cast<int>(layout.schedule), layout.pipeline, num_micro_batches, layout.virtual_stages};
  std::vector<int>& found = cache().slots[key];
  if (found.empty()) {
    for (int s = 0; s < layout.pipeline * layout.virtual_stages; ++s) {
      found.push_back(num_slots(layout, s, num_micro_batches));
    }
  }
  slots_of_ = num_micro_batches;
  known_slots_ = &found;
  return found;
}

StageMemories::StageMemories(StageMemories&& other) noexcept = default;
StageMemories::~StageMemories() = default;

StageMemory StageMemories::of(const Group& group, int stage) const {
  StageMemory memory = group.rooms[static_cast<size_t>(stage)];
  const std::vector<int>& counts = request_.layout->num_micro_batches;
  int m = 1;
  if (counts.size() == 1 || group.data_ranks.empty()) {
    m = *std::max_element(counts.begin(), counts.end());
  } else {
    for (const int d : group.data_ranks) {
      m = std::max(m, counts[static_cast<size_t>(d)]);
    }
  }
  const StageBytes bytes(request_, *group.profile, group.sums, slots(m), m, stage, runs_.get());
  memory.breakdown = bytes.breakdown();
  memory.peak_bytes = memory.breakdown.total();
  memory.capacity_bytes =
      memory.reserved_bytes +
      static_cast<int64_t>(static_cast<double>(memory.capacity_bytes - memory.reserved_bytes) /
                           request_.memory_error[static_cast<size_t>(bytes.strongest_recompute())]);
  return memory;
}

StageMemory StageMemories::of(int stage) const {
  StageMemory worst = of(groups_[0], stage);
  for (size_t i = 1; i < groups_.size(); ++i) {
    const StageMemory own = of(groups_[i], stage);
    worst = own.missing_bytes() > worst.missing_bytes() ? own : worst;
  }
  return worst;
}

// Data ranks with sizes of their own may have few micro-batches, whatever there are in a step.
bool StageMemories::proven_too_large(int num_micro_batches) const {
  return std::any_of(groups_.begin(), groups_.end(), [&](const Group& group) {
    return proven_too_large(group, groups_.size() == 1 ? num_micro_batches : 1);
  });
}

bool StageMemories::proven_too_large(const Group& group, int num_micro_batches) const {
  const Layout& layout = *request_.layout;
  const std::array<double, 3>& errors = request_.memory_error;
  const auto mode = static_cast<size_t>(layout.recompute);
  const bool may_mix = layout.recompute_as_needed || !layout.block_recompute.empty();
  std::vector<double> kept;  // the least that a block may
  for (const BlockClass& block : group.profile->classes) {
    const std::array<double, 3>& stash = block.stash_bytes;
    kept.push_back(may_mix ? *std::min_element(stash.begin(), stash.end()) : stash[mode]);
  }
  const double error = may_mix ? *std::min_element(errors.begin(), errors.end()) : errors[mode];
  return weighted_shortage(group, num_micro_batches, kept, error, nullptr) > 0;
}

// Let a block add a_r to rank r, which has room R_r, and l_r >= 0 be any weights. If a cut fits,
// then sum over blocks of min over r of l_r a_r <= sum_r l_r R_r. The weights make a block of
// average size count alike on every rank: l_r = 1 / (its a_r). By how much that fails, where blocks
// of a class keep `kept` of a micro-batch; `freed`: of it, what a byte less that is kept is worth
// at most.
double StageMemories::weighted_shortage(const Group& group,
                                        int num_micro_batches,
                                        const std::vector<double>& kept,
                                        double error,
                                        double* freed) const {
  const ModelProfile& profile = *group.profile;
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
  std::vector<double> count(profile.classes.size(), 0);
  for (const int block : profile.blocks) {
    count[static_cast<size_t>(block)] += 1;
  }
  const auto in_flight = [&](int rank) {
    return static_cast<double>(stages_in_flight(layout, rank, num_micro_batches)) /
           layout.virtual_stages;
  };
  const auto added = [&](size_t c, int rank) {
    const BlockClass& block = profile.classes[c];
    const double own = block.parameters - (layout.pipeline == 1 ? block.shared_parameters : 0);
    return per_element * own + kept[c] * in_flight(rank);
  };
  double room = 0;
  std::vector<double> least(count.size(), 1e300);
  for (int rank = 0; rank < layout.pipeline; ++rank) {
    double sum = 0;
    for (size_t c = 0; c < count.size(); ++c) {
      sum += count[c] * added(c, rank);
    }
    const double weight = static_cast<double>(profile.num_blocks()) / sum;
    const StageMemory& own = group.rooms[static_cast<size_t>(rank)];
    room += weight * static_cast<double>(own.capacity_bytes - own.reserved_bytes) / error;
    for (size_t c = 0; c < count.size(); ++c) {
      least[c] = std::min(least[c], weight * added(c, rank));
    }
    if (freed != nullptr) {
      *freed = std::max(*freed, weight * in_flight(rank));
    }
  }
  double needed = 0;
  for (size_t c = 0; c < count.size(); ++c) {
    needed += count[c] * least[c];
  }
  return needed - room * (1 + 1e-9);
}

double StageMemories::least_seconds_again(int num_micro_batches,
                                          const std::array<std::vector<double>, 3>& seconds) const {
  const Group& group = groups_[0];
  const ModelProfile& profile = *group.profile;
  std::vector<double> kept;
  for (const BlockClass& block : profile.classes) {
    kept.push_back(block.stash_bytes[0]);
  }
  const std::array<double, 3>& errors = request_.memory_error;
  double freed = 0;
  double shortage = weighted_shortage(
      group, num_micro_batches, kept, *std::min_element(errors.begin(), errors.end()), &freed);
  if (shortage <= 0) {
    return 0;
  }
  std::vector<std::pair<double, double>> steps;  // price of a byte, bytes: of all blocks of a class
  for (size_t c = 0; c < profile.classes.size(); ++c) {
    const auto count = static_cast<double>(
        std::count(profile.blocks.begin(), profile.blocks.end(), static_cast<int>(c)));
    for (const RecomputeStep& step :
         recompute_steps(profile.classes[c], {seconds[0][c], seconds[1][c], seconds[2][c]})) {
      steps.emplace_back(step.seconds / step.bytes, count * step.bytes);
    }
  }
  std::sort(steps.begin(), steps.end());
  double again = 0;
  for (const auto& [price, bytes] : steps) {
    const double taken = std::min(bytes, std::max(0.0, shortage / freed));
    again += price * taken;
    shortage -= freed * taken;
  }
  return again;
}

std::vector<RecomputeStep> recompute_steps(const BlockClass& block,
                                           const std::array<double, 3>& seconds) {
  std::vector<RecomputeStep> steps;
  double freed = 0, longer = 0;  // by the steps so far
  for (const RecomputeMode mode : {RecomputeMode::kSelective, RecomputeMode::kFull}) {
    const auto at = static_cast<size_t>(mode);
    const double bytes = block.stash_bytes[0] - block.stash_bytes[at];
    const double more = seconds[at] - seconds[0];
    if (!block.recomputed || bytes <= freed) {
      continue;
    }
    if (!steps.empty() && more * freed <= longer * bytes) {  // no dearer than the step before
      steps.clear();
      freed = longer = 0;
    }
    steps.push_back({mode, bytes - freed, more - longer});
    freed = bytes;
    longer = more;
  }
  return steps;
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
