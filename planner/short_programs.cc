// A rank's arena is [persistent | slots | what the phases need beside them], and each of these is a
// sum over its virtual stages, or the largest of them (parallel/memory_plan). So it is enough to
// know virtual stages, and of those of one kind (equal blocks in equal order, both or neither at an
// end of the model) one. The tensors that virtual stages of a rank share are those that two stages
// of the short pipeline share.
#include "planner/short_programs.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <set>

#include "graph/base/error.h"
#include "parallel/assign_offsets.h"

namespace trainrt {

namespace {

// Numbers that pipeline ranks send each other for the update.
constexpr int64_t kOtherRanks = 1 << 16;
// A kind of virtual stage, and where it first stands.
struct Kind {
  int stage = 0;           // of the plan
  int first = 0, end = 0;  // its blocks
  bool in_flight = false;  // several micro-batches at once
};

// What a virtual stage adds to a rank.
struct StageParts {
  MemoryBreakdown persistent;  // of tensors of its own
  int64_t step_wide = 0;
  int64_t messages = 0;            // but for packed numbers
  std::map<int, int64_t> numbers;  // by kind: those that a stage of it is sent
  int64_t slot = 0;
  int64_t beside = 0;
  int64_t step = 0;
  MemoryBreakdown peak;  // transients by category
};

int64_t* field(MemoryBreakdown* breakdown, ValueKind kind) {
  switch (kind) {
    case ValueKind::kParameter:
      return &breakdown->parameters;
    case ValueKind::kGradient:
      return &breakdown->gradients;
    case ValueKind::kOptimizerState:
      return &breakdown->optimizer;
    default:
      return &breakdown->state;
  }
}

template <typename Fn>
void for_each_field(MemoryBreakdown* a, const MemoryBreakdown& b, const Fn& fn) {
  fn(a->parameters, b.parameters);
  fn(a->gradients, b.gradients);
  fn(a->optimizer, b.optimizer);
  fn(a->state, b.state);
  fn(a->activations, b.activations);
  fn(a->workspace, b.workspace);
  fn(a->communication, b.communication);
}

class ShortPipeline {
 public:
  ShortPipeline(const ProgramSource& source,
                const Plan& plan,
                const std::function<DeviceSpec(int rank)>& device)
      : source_(source), plan_(plan), device_(device) {}

  std::optional<std::vector<RankMemory>> run() {
    if (!supported() || !find_kinds() || !compile()) {
      return std::nullopt;
    }
    std::vector<RankMemory> result;
    std::map<std::pair<int, std::vector<const RankParts*>>, RankMemory> known;  // by stage
    for (int rank = 0; rank < plan_.world_size(); ++rank) {
      const RankCoordinates at = rank_coordinates(plan_, rank);
      std::vector<const RankParts*> parts;
      for (int s = at.stage; s < num_stages(); s += plan_.pipeline_parallel) {
        parts.push_back(&short_parts(s, at));
      }
      const auto [found, is_new] = known.try_emplace({at.stage, std::move(parts)});
      if (is_new) {
        std::optional<RankMemory> memory = put_together(at);
        if (!memory) {
          return std::nullopt;
        }
        found->second = *memory;
      }
      result.push_back(found->second);
    }
    return result;
  }

 private:
  int num_stages() const { return static_cast<int>(plan_.stages.size()); }

  bool supported() const {
    return num_stages() > 1 && !plan_.exact_reduction && !plan_.offload_optimizer &&
           plan_.schedule != ScheduleKind::k2BW &&
           std::all_of(plan_.shares.begin(),
                       plan_.shares.end(),
                       [&](const DataShare& share) {
                         // A step of one micro-batch is one time line over all virtual stages.
                         return share.num_micro_batches > (plan_.pipeline_parallel > 1 ? 1 : 0);
                       }) &&
           std::all_of(plan_.stages.begin(), plan_.stages.end(), [](const PlanStage& stage) {
             return stage.recompute_nodes.empty();
           });
  }

  // Slots of each virtual stage for a data rank's micro-batches.
  const std::vector<int>& slots(int micro_batches) {
    std::vector<int>& found = slots_[micro_batches];
    if (found.empty()) {
      const Schedule schedule = make_schedule(
          plan_.schedule, plan_.pipeline_parallel, micro_batches, plan_.virtual_stages);
      for (int s = 0; s < num_stages(); ++s) {
        found.push_back(
            max_in_flight(schedule.ranks[static_cast<size_t>(s % plan_.pipeline_parallel)], s));
      }
    }
    return found;
  }

  // Whether a virtual stage's activations wait in slots.
  bool in_flight(int stage) {
    return std::any_of(plan_.shares.begin(), plan_.shares.end(), [&](const DataShare& share) {
      const auto m = static_cast<int>(share.num_micro_batches);
      return m > 1 && (plan_.virtual_stages > 1 || slots(m)[static_cast<size_t>(stage)] > 1);
    });
  }

  bool find_kinds() {
    const std::shared_ptr<const Graph> graph = source_.forward(plan_.micro_batch_size);
    const Graph& whole = *graph;
    list_ = find_blocks(whole);
    int last = 0;
    std::vector<int> stage_of;
    for (const Block& block : list_.blocks) {
      classes_.push_back(block.block_class);
      for (const NodeId id : block.forward) {
        last = std::max(last, whole.node(id).source_index);
      }
      last_source_.push_back(last);
      int stage = 0;
      while (stage + 1 < num_stages() &&
             plan_.stages[static_cast<size_t>(stage)].last_node < last) {
        ++stage;
      }
      stage_of.push_back(stage);
    }
    std::vector<Kind> stages;
    std::vector<std::vector<int>> keys;
    for (int s = 0, block = 0; s < num_stages(); ++s) {
      Kind kind{s, block, block, in_flight(s)};
      while (kind.end < static_cast<int>(stage_of.size()) &&
             stage_of[static_cast<size_t>(kind.end)] == s) {
        ++kind.end;
      }
      block = kind.end;
      if (kind.first == kind.end) {
        return false;
      }
      std::vector<int>& key =
          keys.emplace_back(classes_.begin() + kind.first, classes_.begin() + kind.end);
      for (int b = kind.first; b < kind.end; ++b) {
        key.push_back(static_cast<int>(plan_.stages[static_cast<size_t>(s)].recompute_of(
            last_source_[static_cast<size_t>(b)])));
      }
      key.push_back((s == 0 ? 1 : 0) + (s + 1 == num_stages() ? 2 : 0) + (kind.in_flight ? 4 : 0));
      stages.push_back(kind);
    }
    std::map<std::vector<int>, int> kind_of_key;
    const std::set<int> wanted = wanted_stages(stages, keys);
    for (size_t s = 0; s < stages.size(); ++s) {
      const auto [known, is_new] = kind_of_key.emplace(keys[s], num_kinds());
      if (wanted.count(static_cast<int>(s)) != 0) {
        kinds_.push_back(stages[s]);
      }
      kind_of_stage_.push_back(known->second);
    }
    return true;
  }

  // The first stage of each kind. Where ranks hold several stages, what these have in common is
  // what two of the wanted ones have: a second stage of a kind is wanted for blocks that no other
  // kind has.
  std::set<int> wanted_stages(const std::vector<Kind>& stages,
                              const std::vector<std::vector<int>>& keys) const {
    std::map<std::vector<int>, std::vector<int>> alike;
    for (size_t s = 0; s < keys.size(); ++s) {
      alike[keys[s]].push_back(static_cast<int>(s));
    }
    std::set<int> wanted;
    std::map<int, int> count;  // wanted stages with blocks of a class
    const auto classes = [&](int stage) {
      const Kind& kind = stages[static_cast<size_t>(stage)];
      return std::set<int>(classes_.begin() + kind.first, classes_.begin() + kind.end);
    };
    const auto want = [&](int stage) {
      wanted.insert(stage);
      for (const int block_class : classes(stage)) {
        ++count[block_class];
      }
    };
    for (const auto& [key, same] : alike) {
      want(same[0]);
    }
    for (const auto& [key, same] : alike) {
      const std::set<int> own = classes(same[0]);
      if (plan_.virtual_stages > 1 && same.size() > 1 &&
          std::any_of(own.begin(), own.end(), [&](int c) { return count[c] < 2; })) {
        want(same[1]);
      }
    }
    return wanted;
  }

  int num_kinds() const { return static_cast<int>(kinds_.size()); }

  // False where the blocks do not fit together.
  bool compile() {
    Plan& plan = short_plan_;
    plan = plan_;
    plan.pipeline_parallel = num_kinds();
    plan.virtual_stages = 1;
    plan.schedule =
        plan_.schedule == ScheduleKind::kInterleaved ? ScheduleKind::k1F1B : plan_.schedule;
    plan.stages.clear();
    plan.devices.resize(static_cast<size_t>(plan.world_size()));
    std::vector<int> kept;  // blocks
    int first = 0;
    for (const Kind& kind : kinds_) {
      for (int block = kind.first; block < kind.end; ++block) {
        kept.push_back(block);
      }
      PlanStage stage = plan_.stages[static_cast<size_t>(kind.stage)];
      stage.virtual_stage = stage.rank_stage = static_cast<int>(plan.stages.size());
      stage.first_node = first;
      stage.last_node = kind.end == static_cast<int>(classes_.size())
                            ? plan_.stages.back().last_node
                            : last_source_[static_cast<size_t>(kept.back())];
      first = stage.last_node + 1;
      plan.stages.push_back(stage);
    }
    std::atomic<bool> fit_together = true;
    const auto factory = [&, kept](int64_t micro_batch, bool accumulate) {
      std::optional<Graph> own = kept_graph(micro_batch, kept);
      fit_together = fit_together && own.has_value();
      TRAINRT_REQUIRE(own.has_value(), kUnsupported, "the blocks do not fit together");
      return source_.train(std::move(*own), micro_batch, accumulate);
    };
    memory_ = std::make_unique<ProgramMemory>(
        factory,
        plan,
        [this](int rank) { return device_of(rank); },
        nullptr,
        [this](Program* program) { order_cells(program); });
    try {
      memory_->compile();
    } catch (const Error&) {
      if (fit_together) {
        throw;
      }
      return false;
    }
    return true;
  }

  std::optional<Graph> kept_graph(int64_t micro_batch, const std::vector<int>& kept) {
    const std::shared_ptr<const Graph> graph = source_.forward(micro_batch);
    const Graph& whole = *graph;
    if (micro_batch == plan_.micro_batch_size) {
      return keep_blocks(whole, list_, kept);
    }
    const BlockList list = find_blocks(whole);
    return list.blocks.size() == classes_.size() ? keep_blocks(whole, list, kept) : std::nullopt;
  }

  // Of a rank of the short pipeline.
  DeviceSpec device_of(int rank) const {
    const int per_stage = plan_.data_parallel * plan_.tensor_parallel;
    const int stage = kinds_[static_cast<size_t>(rank / per_stage)].stage % plan_.pipeline_parallel;
    return device_(stage * per_stage + rank % per_stage);
  }

  // As many micro-batches in flight as make the difference: two where there are several.
  void order_cells(Program* program) const {
    if (program->micro_batches.size() < 2) {
      return;
    }
    const int stage = program->coordinates.stage;
    const bool several = kinds_[static_cast<size_t>(stage)].in_flight;
    std::vector<Cell> cells;
    std::vector<PhaseKind> phases;
    for (const Cell& cell : program->cells) {
      const bool of_micro_batch = cell.phase == PhaseKind::kForward ||
                                  cell.phase == PhaseKind::kBackward ||
                                  cell.phase == PhaseKind::kWeightGrad;
      if (of_micro_batch && std::find(phases.begin(), phases.end(), cell.phase) == phases.end()) {
        phases.push_back(cell.phase);
      }
      if (!of_micro_batch) {
        cells.push_back(cell);
      }
    }
    std::sort(phases.begin(), phases.end());
    if (several) {
      for (const PhaseKind phase : phases) {
        cells.push_back({phase, stage, 0});
        cells.push_back({phase, stage, 1});
      }
    } else {
      for (const int micro_batch : {0, 1}) {
        for (const PhaseKind phase : phases) {
          cells.push_back({phase, stage, micro_batch});
        }
      }
    }
    program->cells = std::move(cells);
  }

  const RankParts& short_parts(int stage, const RankCoordinates& at) const {
    const int kind = kind_of_stage_[static_cast<size_t>(stage)];
    return memory_->parts(rank_of(short_plan_, {kind, at.data_rank, at.tensor_rank}));
  }

  // Keys of tensors that two stages of the short pipeline hold.
  std::set<std::string> shared(const RankCoordinates& at) const {
    std::set<std::string> seen, twice;
    for (int k = 0; k < num_kinds() && plan_.virtual_stages > 1; ++k) {
      const RankParts& parts =
          memory_->parts(rank_of(short_plan_, {k, at.data_rank, at.tensor_rank}));
      for (const PersistentTensor& tensor : parts.persistent) {
        if (!seen.insert(tensor.key).second) {
          twice.insert(tensor.key);
        }
      }
    }
    return twice;
  }

  static StageParts stage_parts(const RankParts& parts, const std::set<std::string>& shared) {
    StageParts result;
    result.peak = parts.plan.breakdown;
    result.step_wide = parts.plan.persistent_bytes - parts.plan.message_bytes;
    result.peak.communication -= parts.plan.message_bytes;
    result.messages = parts.plan.message_bytes;
    result.numbers = parts.plan.numbers;
    for (const auto& [kind, count] : result.numbers) {
      result.messages -= bytes_of_numbers(count);
    }
    for (const PersistentTensor& tensor : parts.persistent) {
      result.step_wide -= tensor.bytes;
      *field(&result.peak, tensor.kind) -= tensor.bytes;
      if (shared.count(tensor.key) == 0) {
        *field(&result.persistent, tensor.kind) += tensor.bytes;
      }
    }
    result.slot = parts.plan.slot_bytes.empty() ? 0 : parts.plan.slot_bytes[0];
    result.beside = parts.plan.stage_bytes[0];
    result.step = parts.plan.step_bytes;
    return result;
  }

  static int64_t bytes_of_numbers(int64_t count) {
    return OffsetAssigner::align(count * dtype_bytes(DType::kFloat64));
  }

  // Every pipeline rank is sent the numbers of all parameters that it has none of itself: of a
  // stage's, those that stages of other kinds there do not share.
  int64_t bytes_of_numbers(const RankCoordinates& at, const std::vector<StageParts>& stages) const {
    int64_t bytes = 0;
    for (int peer = 0; peer < plan_.pipeline_parallel; ++peer) {
      int64_t count = 0;
      for (size_t i = 0; peer != at.stage && i < stages.size(); ++i) {
        int64_t own = 0;
        for (const auto& [kind, sent] : stages[i].numbers) {
          own = std::max(own, sent);
        }
        count += own;
        for (int s = peer; s < num_stages(); s += plan_.pipeline_parallel) {
          const auto sent = stages[i].numbers.find(kind_of_stage_[static_cast<size_t>(s)]);
          count -= sent == stages[i].numbers.end() ? 0 : own - sent->second;
        }
      }
      bytes += bytes_of_numbers(count);
    }
    return bytes;
  }

  std::optional<RankMemory> put_together(const RankCoordinates& at) {
    const std::set<std::string> common = shared(at);
    RankMemory result;
    MemoryBreakdown& bytes = result.breakdown;
    MemoryBreakdown peak;
    std::set<std::string> counted;
    std::vector<StageParts> stages;
    int64_t persistent = 0, slots_extent = 0, beside = 0, step = 0, largest_step = 0;
    for (int s = at.stage; s < num_stages(); s += plan_.pipeline_parallel) {
      const RankParts& parts = short_parts(s, at);
      const StageParts own = stage_parts(parts, common);
      for_each_field(&bytes, own.persistent, [&](int64_t& a, int64_t b) { a += b; });
      bytes.state += own.step_wide;
      bytes.communication += own.messages;
      for (const PersistentTensor& tensor : parts.persistent) {
        if (common.count(tensor.key) != 0 && counted.insert(tensor.key).second) {
          *field(&bytes, tensor.kind) += tensor.bytes;
        }
      }
      if (own.slot > 0) {
        slots_extent += slots(parts.num_micro_batches)[static_cast<size_t>(s)] * own.slot;
      }
      if (own.beside >= beside) {
        beside = own.beside;
        peak = own.peak;
      }
      step += own.step;
      largest_step = std::max(largest_step, own.step);
      stages.push_back(own);
    }
    bytes.communication += bytes_of_numbers(at, stages);
    persistent = bytes.total();
    const int64_t dynamic = slots_extent + beside;
    if (plan_.pipeline_parallel > 1 && step + kOtherRanks > dynamic) {
      return std::nullopt;  // what the updates of several stages need at once is no sum
    }
    result.peak_bytes = persistent + std::max(dynamic, largest_step);
    const int64_t rest = result.peak_bytes - persistent;
    bytes.gradients += std::clamp<int64_t>(peak.gradients, 0, rest);
    bytes.workspace += std::clamp<int64_t>(peak.workspace, 0, result.peak_bytes - bytes.total());
    bytes.communication +=
        std::clamp<int64_t>(peak.communication, 0, result.peak_bytes - bytes.total());
    bytes.activations += result.peak_bytes - bytes.total();
    return result;
  }

  const ProgramSource& source_;
  const Plan& plan_;
  const std::function<DeviceSpec(int rank)>& device_;
  BlockList list_;
  std::vector<int> classes_, last_source_;  // by block
  std::vector<Kind> kinds_;
  std::vector<int> kind_of_stage_;
  std::map<int, std::vector<int>> slots_;  // by micro-batches
  Plan short_plan_;
  std::unique_ptr<ProgramMemory> memory_;
};

}  // namespace

std::optional<std::vector<RankMemory>> short_program_memory(
    const ProgramSource& source,
    const Plan& plan,
    const std::function<DeviceSpec(int rank)>& device) {
  return ShortPipeline(source, plan, device).run();
}

}  // namespace trainrt
