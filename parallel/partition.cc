// One rank's Program, in the order of the steps: whole training graph at the rank's micro-batch
// sizes (shared by ranks), the rank's share of its nodes, phases, order within phases, cells.
#include "parallel/partition.h"

#include <algorithm>
#include <compare>
#include <map>
#include <tuple>
#include <utility>

#include "graph/op_def.h"
#include "graph/whole_batch.h"
#include "parallel/made_once.h"
#include "parallel/passes/batch_norm_ranks.h"
#include "parallel/passes/buckets.h"
#include "parallel/passes/delay_weights.h"
#include "parallel/passes/elementwise_fusion.h"
#include "parallel/passes/epilogue_fusion.h"
#include "parallel/passes/exact_reduction.h"
#include "parallel/passes/padding.h"
#include "parallel/passes/recompute.h"
#include "parallel/passes/run_on.h"
#include "parallel/passes/spmd_lowering.h"
#include "parallel/phase_order.h"
#include "parallel/rank_cells.h"
#include "parallel/rank_graph.h"
#include "parallel/silent_variant.h"
#include "parallel/stage_cut.h"

namespace trainrt {

// What a micro-batch is compiled for.
struct Partitioner::VariantKey {
  MicroBatchShape shape;  // of this rank
  int64_t synced = 0;     // of all data ranks, where BatchNorm is synchronised; else 0
  auto operator<=>(const VariantKey&) const = default;
};

// What a tensor and data rank runs for one micro-batch, all stages.
struct Partitioner::Lowered {
  TrainingGraph graph;
  std::map<std::string, TensorPiece> pieces;
  StageCut cut;
  // Data ranks communicate within a micro-batch, so all need equally many.
  bool lockstep = false;
};

struct Partitioner::Cache {
  MadeOnce<MicroBatchShape, TrainingGraph> whole;  // recomputation is in it
  MadeOnce<std::tuple<VariantKey, int, int>, Lowered> lowered;
  // Where persistent tensors lie under the largest micro-batch: they lie there under all.
  MadeOnce<MicroBatchShape, std::map<std::string, Placement>> placements;
};

namespace {

void check_plan(const Plan& plan) {
  TRAINRT_REQUIRE(plan.data_parallel >= 1 && plan.tensor_parallel >= 1 &&
                      plan.pipeline_parallel >= 1 && plan.virtual_stages >= 1,
                  kInvalidArgument,
                  "a plan's degrees are at least 1");
  TRAINRT_REQUIRE(plan.virtual_stages == 1 || plan.pipeline_parallel > 1,
                  kInfeasiblePlan,
                  "virtual stages need more than one pipeline rank");
  TRAINRT_REQUIRE(static_cast<int>(plan.shares.size()) == plan.data_parallel,
                  kInvalidArgument,
                  "the plan has ",
                  plan.shares.size(),
                  " shares for ",
                  plan.data_parallel,
                  " data ranks");
  int64_t samples = 0;
  for (const DataShare& share : plan.shares) {
    samples += share.num_samples;
  }
  TRAINRT_REQUIRE(samples > 0 && samples == plan.global_batch,
                  kInvalidArgument,
                  "the shares add up to ",
                  samples,
                  " samples, the global batch is ",
                  plan.global_batch);
}

// `cuts`: micro-batches by data rank; empty: they are chosen step by step.
void check_whole_batch(const Graph& graph,
                       const Plan& plan,
                       const std::vector<std::vector<MicroBatchCut>>& cuts) {
  if (cuts.size() == 1 && cuts[0].size() == 1) {
    return;
  }
  const std::string reason = whole_batch_because(graph);
  TRAINRT_REQUIRE(reason.empty(),
                  kInfeasiblePlan,
                  reason,
                  ", so the step must run as one micro-batch on one data rank; use --dp 1 "
                  "--micro-batch-size ",
                  plan.global_batch,
                  " without --max-tokens");
}

// Which values the host writes before, and reads after, each phase.
void connect_host(ProgramVariant& variant) {
  const Graph& graph = variant.graph;
  for (Phase& phase : variant.phases) {
    std::vector<bool> listed(static_cast<size_t>(graph.num_values()), false);
    std::vector<bool> made(static_cast<size_t>(graph.num_values()), false);
    for (const NodeId id : phase.nodes) {
      for (const ValueId input : graph.node(id).inputs) {
        if (input != kNoValue && graph.value(input).kind == ValueKind::kInput &&
            !listed[static_cast<size_t>(input)]) {
          listed[static_cast<size_t>(input)] = true;
          phase.feeds.push_back(input);
        }
      }
      for (const ValueId output : graph.node(id).outputs) {
        if (output != kNoValue) {
          made[static_cast<size_t>(output)] = true;
        }
      }
    }
    std::vector<ValueId> read = graph.outputs();
    read.insert(read.end(),
                {variant.loss_sum, variant.item_count, variant.grad_norm, variant.correct});
    for (const ValueId id : read) {
      if (id != kNoValue && made[static_cast<size_t>(id)]) {
        made[static_cast<size_t>(id)] = false;  // once
        phase.fetches.push_back(id);
      }
    }
  }
}

// What the data axis does to the update: gradients are summed over it, and ZeRO cuts the state.
SpmdOptions data_axis(const Plan& plan, const Graph& graph, int data_rank) {
  SpmdOptions options;
  options.axis = {"data", plan.data_parallel, data_rank};
  // The tree of an exact sum needs whole terms until all of a shard are there.
  const bool cut_gradients = plan.zero_stage >= 2 && !plan.exact_reduction;
  options.sum_at_once = plan.exact_reduction;
  options.lowered = [cut_gradients](const Node& node) {
    return node.region == Region::kUpdate || (cut_gradients && node.op_type == "Accumulate");
  };
  for (const Value& value : graph.values()) {
    const bool cut = (value.kind == ValueKind::kOptimizerState && plan.zero_stage >= 1) ||
                     (value.kind == ValueKind::kGradient && cut_gradients) ||
                     (value.kind == ValueKind::kParameter && plan.zero_stage >= 3);
    if (cut && !value.type.shape.empty() && value.type.shape[0] >= plan.data_parallel) {
      options.pinned[value.name] = Placement::shard(0);
    }
  }
  return options;
}

SpmdOptions tensor_axis(const Plan& plan, int tensor_rank) {
  SpmdOptions options;
  options.axis = {"tensor", plan.tensor_parallel, tensor_rank};
  options.cut_weights = true;
  options.sequence_parallel = plan.sequence_parallel;
  for (const auto& [name, placement] : plan.placements) {
    options.pinned[name] = placement.tensor;
    if (plan.schedule == ScheduleKind::k2BW) {
      options.pinned[previous_version(name)] = placement.tensor;
    }
  }
  return options;
}

bool has_op(const Graph& graph, const std::string& op_type) {
  return std::any_of(graph.nodes().begin(), graph.nodes().end(), [&](const Node& node) {
    return node.op_type == op_type;
  });
}

// The collectives over data ranks within a micro-batch, in order: whose gradient, parameter or sum
// each is. Names in between may differ with the size (a gradient of one sample needs no sum).
std::vector<std::string> data_collectives(const ProgramVariant& variant) {
  const Graph& graph = variant.graph;
  const std::vector<std::vector<NodeId>> consumers = graph.consumers();
  std::vector<std::string> names;
  for (const Phase& phase : variant.phases) {
    for (const NodeId id : phase.nodes) {
      const Node& node = graph.node(id);
      if (node.region == Region::kUpdate || !is_communication(node.op_type) ||
          node.attributes.get_string("group", "") != "data") {
        continue;
      }
      for (size_t i = 0; i < node.inputs.size(); ++i) {
        const Value& source = graph.value(node.inputs[i]);
        const std::vector<NodeId>& readers = consumers[static_cast<size_t>(node.outputs[i])];
        const bool of_gradient = !readers.empty() && graph.node(readers[0]).op_type == "Accumulate";
        names.push_back(concat(phase_letter(phase.kind),
                               phase.virtual_stage,
                               i == 0 ? " " : " + ",
                               is_persistent(source.kind) ? source.name
                               : of_gradient              ? graph.node(readers[0]).name
                                                          : node.name));
      }
    }
  }
  return names;
}

// What runs once per step is a matter of the first variant.
void once_in_first_variant(Program& program) {
  for (size_t v = 1; v < program.variants.size(); ++v) {
    std::erase_if(program.variants[v].phases, [](const Phase& phase) {
      return phase.kind == PhaseKind::kReduce || phase.kind == PhaseKind::kUpdate;
    });
  }
}

// Whether gradients are summed over data ranks while the step's last backward still runs: those of
// ZeRO 2 and 3 are summed in every micro-batch, exact ones only when all are there. The sums come
// in the order of the backward, so all data ranks must run the same one.
bool sums_in_last_backward(const Plan& plan, const std::vector<std::vector<MicroBatchCut>>& cuts) {
  return plan.data_parallel > 1 && plan.zero_stage <= 1 && !plan.exact_reduction &&
         !plan.sync_batch_norm &&
         std::all_of(cuts.begin(), cuts.end(), [&](const std::vector<MicroBatchCut>& own) {
           return !own.empty() && !cuts[0].empty() &&
                  own.back().num_samples == cuts[0].back().num_samples;
         });
}

bool communicates_in_micro_batch(const Graph& graph) {
  return std::any_of(graph.nodes().begin(), graph.nodes().end(), [](const Node& node) {
    return node.region != Region::kUpdate && is_communication(node.op_type) &&
           node.attributes.get_string("group", "") == "data";
  });
}

}  // namespace

Partitioner::Partitioner(const TrainingGraphFactory& factory, Plan plan)
    : factory_([factory](const MicroBatchShape& shape, bool accumulate) {
        return factory(shape.num_samples, accumulate);
      }),
      plan_(std::move(plan)),
      cache_(std::make_unique<Cache>()) {
  check_plan(plan_);
  accumulates_ = plan_.exact_reduction;
  for (int d = 0; d < plan_.data_parallel; ++d) {
    cuts_.push_back(cut_micro_batches(plan_, d));
    // A rank without samples adds zeros to the sums, for which it needs an accumulator too; ranks
    // of different sizes share one order of the update (program() below), apart from the backward.
    accumulates_ =
        accumulates_ || cuts_.back().size() != 1 ||
        (plan_.tensor_parallel > 1 && cuts_.back()[0].num_samples != cuts_[0][0].num_samples);
    rounds_ = std::max(rounds_, cuts_.back().size());
    for (const MicroBatchCut& cut : cuts_.back()) {
      largest_.num_samples = std::max(largest_.num_samples, cut.num_samples);
    }
  }
  for (const std::vector<MicroBatchCut>& cuts : cuts_) {
    one_size_ = one_size_ && std::all_of(cuts.begin(), cuts.end(), [&](const MicroBatchCut& cut) {
                  return cut.num_samples == largest_.num_samples;
                });
  }
  sums_in_last_ = accumulates_ && sums_in_last_backward(plan_, cuts_);
}

Partitioner::Partitioner(ShapedGraphFactory factory, Plan plan, std::vector<MicroBatchShape> shapes)
    : factory_(std::move(factory)),
      plan_(std::move(plan)),
      shapes_(std::move(shapes)),
      cache_(std::make_unique<Cache>()) {
  check_plan(plan_);
  TRAINRT_CHECK(!shapes_.empty());
  const auto refuse = [](bool refused, const std::string& what) {
    TRAINRT_REQUIRE(!refused,
                    kUnsupported,
                    what,
                    " has to know a step's micro-batches beforehand, which --max-tokens chooses "
                    "step by step");
  };
  refuse(plan_.exact_reduction, "--reduction exact");
  refuse(plan_.sync_batch_norm && plan_.data_parallel > 1, "--batch-norm sync");
  refuse(plan_.schedule == ScheduleKind::k2BW, "--schedule 2bw");
  refuse(plan_.schedule == ScheduleKind::kGPipe && plan_.pipeline_parallel > 1,
         "the memory of --schedule gpipe");
  largest_ = shapes_[0];
  accumulates_ = true;
  one_size_ = shapes_.size() == 1;
}

Partitioner::~Partitioner() = default;

const TrainingGraph& Partitioner::whole(const MicroBatchShape& shape) {
  return cache_->whole.at(shape, [&] {
    TrainingGraph graph = factory_(shape, accumulates_);
    check_whole_batch(graph.graph, plan_, cuts_);
    drop_sample_counts(graph.graph);
    if (shape != largest_) {
      graph = rematerialize_like(std::move(graph), whole(largest_));
    }
    if (plan_.schedule == ScheduleKind::k2BW) {
      runs_on_ = runs_on(plan_, graph.graph);
      graph = delay_weights(std::move(graph));
      graph = runs_on_ ? update_without_norm(std::move(graph)) : std::move(graph);
    }
    return apply_recompute(std::move(graph), plan_);
  });
}

// One tensor rank's graph of a micro-batch.
TrainingGraph Partitioner::on_tensor_rank(const MicroBatchShape& shape,
                                          int tensor_rank,
                                          std::map<std::string, TensorPiece>* pieces) {
  const TrainingGraph& graph = whole(shape);
  SpmdOptions options = tensor_axis(plan_, tensor_rank);
  const std::map<std::string, Placement>& placements = cache_->placements.at(largest_, [&] {
    std::map<std::string, TensorPiece> ignored;
    std::map<std::string, Placement> found;
    lower_to_rank(whole(largest_), tensor_axis(plan_, 0), &ignored, &found);
    return found;
  });
  for (const auto& [name, placement] : placements) {
    options.pinned[name] = placement;
  }
  return lower_to_rank(graph, options, pieces);
}

const Partitioner::Lowered& Partitioner::lowered(const VariantKey& key, const RankCoordinates& at) {
  // Data ranks differ only where something is cut over them or gathered from them.
  const bool same_for_all =
      plan_.data_parallel == 1 || (plan_.zero_stage == 0 && !has_state_ && !plan_.exact_reduction);
  const int data_rank = same_for_all ? 0 : at.data_rank;
  return cache_->lowered.at({key, at.tensor_rank, data_rank},
                            [&] { return lower(key, at.tensor_rank, data_rank); });
}

Partitioner::Lowered Partitioner::lower(const VariantKey& key, int tensor_rank, int data_rank) {
  Lowered result;
  const bool cut = plan_.tensor_parallel > 1;
  // A step whose gradient is not finite: the update of a model's own training_info asks for none.
  const bool may_skip = plan_.precision == "fp16" && has_op(whole(key.shape).graph, "ClipScale");
  TrainingGraph graph;
  if (cut) {
    graph = on_tensor_rank(key.shape, tensor_rank, &result.pieces);
  } else if (plan_.data_parallel == 1) {
    graph = whole(key.shape);
  }
  if (plan_.data_parallel > 1) {
    const TrainingGraph& source = cut ? graph : whole(key.shape);
    graph = lower_to_rank(source, data_axis(plan_, source.graph, data_rank), &result.pieces);
    if (plan_.sync_batch_norm) {
      graph = sync_batch_norm(std::move(graph), key.shape.num_samples, key.synced);
      if (may_skip) {  // all ranks find the same, so each folds its own
        graph = fold_running_averages(
            std::move(graph), {std::vector<MicroBatchCut>(rounds_)}, 0, may_skip);
      }
    } else {
      graph = fold_running_averages(std::move(graph), cuts_, data_rank, may_skip);
    }
  } else if (!cuts_.empty() &&
             (may_skip || (plan_.pipeline_parallel > 1 && shares_running_averages(graph.graph)))) {
    graph = fold_running_averages(std::move(graph), cuts_, data_rank, may_skip);
  }
  if (plan_.exact_reduction) {
    graph = exact_reduction(std::move(graph), cuts_, num_shards(plan_), data_rank);
  }
  result.graph = pad_products(std::move(graph), plan_.padding);
  result.cut = cut_stages(result.graph.graph, plan_, runs_on_);
  result.lockstep = communicates_in_micro_batch(result.graph.graph);
  return result;
}

// Samples of micro-batch `i` of all data ranks, where BatchNorm is synchronised.
int64_t Partitioner::synced_samples(size_t i) const {
  int64_t samples = 0;
  for (const std::vector<MicroBatchCut>& cuts : cuts_) {
    samples += i < cuts.size() ? cuts[i].num_samples : 0;
  }
  return plan_.sync_batch_norm && plan_.data_parallel > 1 ? samples : 0;
}

ProgramVariant Partitioner::variant(const VariantKey& key,
                                    const RankCoordinates& at,
                                    Backend backend,
                                    std::map<std::string, TensorPiece>* pieces,
                                    bool is_last) {
  const Lowered& source = lowered(key, at);
  const bool merge_update =
      !accumulates_ && plan_.pipeline_parallel == 1 && plan_.virtual_stages == 1;
  const UpdatePlace place = merge_update ? UpdatePlace::kInBackward
                            : is_last    ? UpdatePlace::kSumsInBackward
                                         : UpdatePlace::kAfterBackward;
  RankGraph rank_graph = make_rank_graph(source.graph, source.cut, plan_, at.stage, place);
  fuse_epilogues(rank_graph, backend);
  settle_updates(rank_graph.local.graph, rank_graph.phases);
  std::vector<Phase> phases = order_phases(rank_graph.local.graph, rank_graph.phases, one_size_);
  bucket_collectives(rank_graph.local, phases, plan_, backend);
  fuse_elementwise(rank_graph.local, phases, backend);
  ProgramVariant variant;
  variant.micro_batch_size = key.shape.num_samples;
  variant.graph = std::move(rank_graph.local.graph);
  variant.loss_sum = rank_graph.local.loss_sum;
  variant.item_count = rank_graph.local.item_count;
  variant.grad_norm = rank_graph.local.grad_norm;
  variant.correct = rank_graph.local.correct;
  variant.phases = std::move(phases);
  connect_host(variant);
  for (const auto& [name, piece] : source.pieces) {
    if (variant.graph.find_value(name)) {
      pieces->emplace(name, piece);
    }
  }
  return variant;
}

Program Partitioner::empty_program(int rank, const DeviceSpec& device) const {
  Program program;
  program.rank = rank;
  program.world_size = plan_.world_size();
  program.coordinates = rank_coordinates(plan_, rank);
  program.device = device;
  program.num_shards = num_shards(plan_);
  program.offload_optimizer = plan_.offload_optimizer;
  return program;
}

Program Partitioner::program(int rank, const DeviceSpec& device) {
  if (!shapes_.empty()) {
    return shaped_program(rank, device);
  }
  Program program = empty_program(rank, device);
  const RankCoordinates& at = program.coordinates;
  const std::vector<MicroBatchCut>& cuts = cuts_[static_cast<size_t>(at.data_rank)];
  // A rank without samples is compiled for any size: what it runs does not depend on it.
  const VariantKey any{largest_, synced_samples(0)};
  if (!cuts.empty()) {
    whole({cuts[0].num_samples, 0});  // beside another thread that makes the largest
  }
  has_state_ = has_state_ || has_op(whole(largest_).graph, "RunningAverage");
  const bool lockstep = plan_.data_parallel > 1 && lowered(any, at).lockstep;
  // Cutting over tensor ranks may order the update otherwise at another micro-batch size, but all
  // data ranks have to sum gradients in one order: that of the largest, or of the last of all.
  const bool own_update = sums_in_last_ || plan_.tensor_parallel == 1 || plan_.data_parallel == 1 ||
                          cuts.empty() || cuts[0].num_samples == largest_.num_samples;
  if (!own_update) {
    program.variants.push_back(update_variant(variant(any, at, device.backend, &program.pieces)));
    connect_host(program.variants.back());
  }
  std::map<std::pair<VariantKey, bool>, int> variants;
  const auto variant_of = [&](size_t i) {
    const VariantKey key{{cuts[i].num_samples, 0}, synced_samples(i)};
    const bool is_last = sums_in_last_ && i + 1 == cuts.size();
    const auto [known, is_new] =
        variants.try_emplace({key, is_last}, static_cast<int>(program.variants.size()));
    if (is_new) {
      program.variants.push_back(variant(key, at, device.backend, &program.pieces, is_last));
      TRAINRT_REQUIRE(!lockstep || key.shape == largest_ ||
                          data_collectives(program.variants.back()) ==
                              data_collectives(variant(any, at, device.backend, &program.pieces)),
                      kInfeasiblePlan,
                      "micro-batches of ",
                      largest_.num_samples,
                      " and of ",
                      key.shape.num_samples,
                      " samples communicate in different orders, so data ranks that have one and "
                      "the other cannot do so within a micro-batch, which --zero ",
                      plan_.zero_stage,
                      " asks for; use a micro-batch size that divides the batch, or --zero 1");
    }
    return known->second;
  };
  if (sums_in_last_) {
    variant_of(cuts.size() - 1);  // the first: its update reads these sums
  }
  for (size_t i = 0; i < cuts.size(); ++i) {
    program.micro_batches.push_back(
        {variant_of(i), cuts[i].first_sample, cuts[i].num_samples, cuts[i].shard, 0});
  }
  // The phases of a full micro-batch, which a rank without samples has none of.
  const bool has_full = !cuts.empty() && own_update;
  const ProgramVariant other =
      has_full ? ProgramVariant{} : variant(any, at, device.backend, &program.pieces);
  const std::vector<Phase> full_phases = has_full ? program.variants[0].phases : other.phases;
  once_in_first_variant(program);
  if (cuts.empty()) {
    program.variants.push_back(idle_variant(other, lockstep));
    connect_host(program.variants.back());
  }
  std::map<int64_t, int> silent;  // by the samples that other ranks have
  for (size_t i = cuts.size(); lockstep && i < rounds_; ++i) {
    const VariantKey key{largest_, synced_samples(i)};
    const auto [known, is_new] =
        silent.try_emplace(key.synced, static_cast<int>(program.variants.size()));
    if (is_new) {
      program.variants.push_back(silent_variant(variant(key, at, device.backend, &program.pieces)));
      connect_host(program.variants.back());
    }
    const int64_t end = cuts.empty() ? 0 : cuts.back().first_sample + cuts.back().num_samples;
    program.micro_batches.push_back({known->second, end, 0, 0, 0});
  }
  program.cells = rank_cells(plan_, at.stage, program.micro_batches, full_phases);
  if (runs_on_) {
    add_windows(plan_, full_phases, &program);
  }
  return program;
}

// All data ranks have the same variants, whatever they run of them in a step.
Program Partitioner::shaped_program(int rank, const DeviceSpec& device) {
  Program program = empty_program(rank, device);
  const RankCoordinates& at = program.coordinates;
  const VariantKey any{largest_, 0};
  TRAINRT_REQUIRE(
      (plan_.data_parallel == 1 && plan_.precision != "fp16") ||
          !has_op(whole(largest_).graph, "RunningAverage"),
      kUnsupported,
      "the running averages of BatchNorm over several data ranks, or in the steps that "
      "--precision fp16 may skip, need to know a step's micro-batches beforehand, which "
      "--max-tokens chooses step by step");
  const bool lockstep = plan_.data_parallel > 1 && lowered(any, at).lockstep;
  for (const MicroBatchShape& shape : shapes_) {
    program.variants.push_back(variant({shape, 0}, at, device.backend, &program.pieces));
    TRAINRT_REQUIRE(!lockstep || data_collectives(program.variants.back()) ==
                                     data_collectives(program.variants[0]),
                    kInfeasiblePlan,
                    "micro-batches of ",
                    shape.num_samples,
                    " x ",
                    shape.length,
                    " tokens are cut differently over the ranks than others, which --zero ",
                    plan_.zero_stage,
                    " with --max-tokens cannot have; use --zero 1");
  }
  once_in_first_variant(program);
  const auto add = [&](ProgramVariant variant) {
    connect_host(variant);
    program.variants.push_back(std::move(variant));
    return static_cast<int>(program.variants.size()) - 1;
  };
  if (lockstep) {
    program.silent_variant = add(silent_variant(program.variants[0]));
  }
  if (plan_.data_parallel > 1) {
    program.idle_variant = add(idle_variant(program.variants[0], lockstep));
  }
  // A step whose samples all are the longest, one by one, has the most micro-batches.
  program.micro_batches.assign(static_cast<size_t>(plan_.global_batch),
                               {0, 0, largest_.num_samples, 0, largest_.length});
  program.cells = rank_cells(plan_, at.stage, program.micro_batches, program.variants[0].phases);
  return program;
}

StepWork step_work(const Plan& plan,
                   const Program& program,
                   std::vector<MicroBatch> micro_batches,
                   size_t rounds) {
  StepWork work;
  work.once_variant = micro_batches.empty() ? program.idle_variant : 0;
  TRAINRT_CHECK(work.once_variant >= 0);
  if (program.silent_variant >= 0 && micro_batches.size() < rounds) {
    micro_batches.resize(rounds, {program.silent_variant, 0, 0, 0, 0});
  }
  work.micro_batches = std::move(micro_batches);
  work.cells =
      rank_cells(plan, program.coordinates.stage, work.micro_batches, program.variants[0].phases);
  for (const int stage : program.local_stages()) {
    TRAINRT_CHECK(max_in_flight(work.cells, stage) <= program.num_stash_slots(stage));
  }
  return work;
}

std::vector<Program> partition(const TrainingGraphFactory& factory,
                               const Plan& plan,
                               const std::vector<DeviceSpec>& devices) {
  TRAINRT_REQUIRE(static_cast<int>(devices.size()) == plan.world_size(),
                  kInvalidArgument,
                  "the plan has ",
                  plan.world_size(),
                  " ranks, but ",
                  devices.size(),
                  " devices are given");
  Partitioner partitioner(factory, plan);
  std::vector<Program> programs;
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    programs.push_back(partitioner.program(rank, devices[static_cast<size_t>(rank)]));
  }
  return programs;
}

}  // namespace trainrt
