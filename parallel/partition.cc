// One rank's Program, in the order of the steps: whole training graph at the rank's micro-batch
// sizes (shared by ranks), the rank's share of its nodes, phases, order within phases, cells.
#include "parallel/partition.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "graph/op_def.h"
#include "parallel/passes/padding.h"
#include "parallel/passes/recompute.h"
#include "parallel/passes/spmd_lowering.h"
#include "parallel/phase_order.h"
#include "parallel/rank_graph.h"
#include "parallel/stage_cut.h"

namespace trainrt {

// What a tensor and data rank runs at one micro-batch size, all stages.
struct Partitioner::Lowered {
  TrainingGraph graph;
  std::map<std::string, TensorPiece> pieces;
  StageCut cut;
};

struct Partitioner::Cache {
  std::map<int64_t, TrainingGraph> whole;  // by micro-batch size; recomputation is in it
  std::map<std::tuple<int64_t, int, int>, Lowered> lowered;
};

namespace {

const DataShare& share_of(const Plan& plan, int data_rank) {
  for (const DataShare& share : plan.shares) {
    if (share.data_rank == data_rank) {
      return share;
    }
  }
  TRAINRT_FAIL(kInvalidArgument, "the plan's shares leave out data rank ", data_rank);
}

int64_t first_sample_of(const Plan& plan, int data_rank) {
  int64_t first = 0;
  for (int d = 0; d < data_rank; ++d) {
    first += share_of(plan, d).num_samples;
  }
  return first;
}

void check_plan(const Plan& plan) {
  TRAINRT_REQUIRE(plan.data_parallel >= 1 && plan.tensor_parallel >= 1 &&
                      plan.pipeline_parallel >= 1 && plan.virtual_stages >= 1,
                  kInvalidArgument,
                  "a plan's degrees are at least 1");
  // Each of these trains by another rule or in another place: running the plan without it would be
  // a different plan.
  TRAINRT_REQUIRE(
      plan.schedule != ScheduleKind::k2BW,
      kInfeasiblePlan,
      "schedule 2bw can be planned but not run yet: it needs two versions of the weights; "
      "use 1f1b");
  TRAINRT_REQUIRE(
      !plan.offload_optimizer,
      kInfeasiblePlan,
      "offloading optimizer state can be planned but not run yet; use --zero to shard it");
  TRAINRT_REQUIRE(!plan.exact_reduction,
                  kInfeasiblePlan,
                  "reduction exact can be planned but not run yet; use fast");
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
  for (int d = 0; d < plan.data_parallel; ++d) {
    const DataShare& share = share_of(plan, d);
    samples += share.num_samples;
    const int64_t most = share.micro_batch_size * share.num_micro_batches;
    TRAINRT_REQUIRE(share.num_samples == 0 || (share.num_samples <= most &&
                                               share.num_samples > most - share.micro_batch_size),
                    kInvalidArgument,
                    "data rank ",
                    d,
                    ": ",
                    share.num_samples,
                    " samples are not ",
                    share.num_micro_batches,
                    " micro-batches of ",
                    share.micro_batch_size);
  }
  TRAINRT_REQUIRE(samples > 0 && samples == plan.global_batch,
                  kInvalidArgument,
                  "the shares add up to ",
                  samples,
                  " samples, the global batch is ",
                  plan.global_batch);
}

// The variants of a share: its full micro-batches, and a short last one.
std::vector<int64_t> micro_batch_sizes(const DataShare& share) {
  std::vector<int64_t> sizes;
  if (share.num_samples > 0) {
    sizes.push_back(std::min(share.micro_batch_size, share.num_samples));
    const int64_t rest = share.num_samples % share.micro_batch_size;
    if (share.num_micro_batches > 1 && rest > 0) {
      sizes.push_back(rest);
    }
  }
  return sizes;
}

std::vector<MicroBatch> micro_batches(const DataShare& share, int64_t first_sample) {
  std::vector<MicroBatch> result;
  for (int64_t i = 0; i < share.num_micro_batches; ++i) {
    const int64_t begin = i * share.micro_batch_size;
    const int64_t size = std::min(share.micro_batch_size, share.num_samples - begin);
    result.push_back(
        {size == share.micro_batch_size || i == 0 ? 0 : 1, first_sample + begin, size});
  }
  return result;
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

// For a rank without samples: the update does not depend on it.
int64_t any_micro_batch_size(const Plan& plan) {
  for (const DataShare& share : plan.shares) {
    if (share.num_samples > 0) {
      return std::min(share.micro_batch_size, share.num_samples);
    }
  }
  return 1;
}

// C cells of all micro-batches, the schedule's row as far as this rank has phases, R and U.
std::vector<Cell> rank_cells(const Plan& plan,
                             int stage,
                             int num_micro_batches,
                             const ProgramVariant& variant) {
  std::vector<Cell> cells;
  const auto add_all = [&](PhaseKind kind) {
    for (const Phase& phase : variant.phases) {
      if (phase.kind == kind) {
        cells.push_back({kind, phase.virtual_stage, -1});
      }
    }
  };
  for (int i = 0; i < num_micro_batches; ++i) {
    for (const Phase& phase : variant.phases) {
      if (phase.kind == PhaseKind::kCount) {
        cells.push_back({PhaseKind::kCount, phase.virtual_stage, i});
      }
    }
  }
  add_all(PhaseKind::kGather);
  if (num_micro_batches > 0) {
    const Schedule schedule = make_schedule(
        plan.schedule, plan.pipeline_parallel, num_micro_batches, plan.virtual_stages);
    for (const Cell& cell : schedule.ranks[static_cast<size_t>(stage)]) {
      if (variant.find_phase(cell.phase, cell.virtual_stage) != nullptr) {
        cells.push_back(cell);
      }
    }
  }
  add_all(PhaseKind::kReduce);
  add_all(PhaseKind::kUpdate);
  return cells;
}

// What the data axis does to the update: gradients are summed over it, and ZeRO cuts the state.
SpmdOptions data_axis(const Plan& plan, const Graph& graph, int data_rank) {
  SpmdOptions options;
  options.axis = {"data", plan.data_parallel, data_rank};
  const bool cut_gradients = plan.zero_stage >= 2;
  options.lowered = [cut_gradients](const Node& node) {
    return node.region == Region::kUpdate || (cut_gradients && node.op_type == "Accumulate");
  };
  for (const Value& value : graph.values()) {
    const bool cut = (value.kind == ValueKind::kOptimizerState && plan.zero_stage >= 1) ||
                     (value.kind == ValueKind::kGradient && plan.zero_stage >= 2) ||
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
  }
  return options;
}

}  // namespace

Partitioner::Partitioner(TrainingGraphFactory factory, Plan plan)
    : factory_(std::move(factory)), plan_(std::move(plan)), cache_(std::make_unique<Cache>()) {
  check_plan(plan_);
  for (const DataShare& share : plan_.shares) {
    // A rank without samples adds zeros to the sums, for which it needs an accumulator too.
    accumulates_ = accumulates_ || share.num_micro_batches != 1;
    TRAINRT_REQUIRE(plan_.zero_stage < 2 || plan_.data_parallel == 1 ||
                        share.num_micro_batches == plan_.shares[0].num_micro_batches,
                    kInfeasiblePlan,
                    "ZeRO stage ",
                    plan_.zero_stage,
                    " communicates in every micro-batch, so all data ranks need equally many; data "
                    "rank ",
                    share.data_rank,
                    " has ",
                    share.num_micro_batches,
                    ", data rank ",
                    plan_.shares[0].data_rank,
                    " has ",
                    plan_.shares[0].num_micro_batches,
                    "; use --zero 1 or equal shares");
  }
}

Partitioner::~Partitioner() = default;

const TrainingGraph& Partitioner::whole(int64_t micro_batch_size) {
  auto found = cache_->whole.find(micro_batch_size);
  if (found == cache_->whole.end()) {
    found = cache_->whole
                .emplace(micro_batch_size,
                         apply_recompute(factory_(micro_batch_size, accumulates_), plan_))
                .first;
  }
  return found->second;
}

const Partitioner::Lowered& Partitioner::lowered(int64_t micro_batch_size,
                                                 const RankCoordinates& at) {
  // Data ranks differ only where state is cut over them.
  const int data_rank = plan_.zero_stage > 0 ? at.data_rank : 0;
  const auto [found, is_new] =
      cache_->lowered.try_emplace({micro_batch_size, at.tensor_rank, data_rank});
  Lowered& result = found->second;
  if (is_new) {
    result.graph = whole(micro_batch_size);
    if (plan_.tensor_parallel > 1) {
      result.graph =
          lower_to_rank(result.graph, tensor_axis(plan_, at.tensor_rank), &result.pieces);
    }
    if (plan_.data_parallel > 1) {
      result.graph = lower_to_rank(
          result.graph, data_axis(plan_, result.graph.graph, data_rank), &result.pieces);
    }
    result.graph = pad_products(result.graph, plan_.padding);
    result.cut = cut_stages(result.graph.graph, plan_);
  }
  return result;
}

Program Partitioner::program(int rank, const DeviceSpec& device) {
  Program program;
  program.rank = rank;
  program.world_size = plan_.world_size();
  program.coordinates = rank_coordinates(plan_, rank);
  program.device = device;
  const DataShare& share = share_of(plan_, program.coordinates.data_rank);
  const bool idle = share.num_samples == 0;
  std::vector<int64_t> sizes = micro_batch_sizes(share);
  if (idle) {
    sizes.push_back(any_micro_batch_size(plan_));
  }
  const bool merge_update =
      !accumulates_ && plan_.pipeline_parallel == 1 && plan_.virtual_stages == 1;
  for (const int64_t size : sizes) {
    const Lowered& source = lowered(size, program.coordinates);
    RankGraph rank_graph = make_rank_graph(
        source.graph, source.cut, plan_, program.coordinates.stage, merge_update, idle);
    ProgramVariant variant;
    variant.micro_batch_size = size;
    variant.graph = std::move(rank_graph.local.graph);
    variant.loss_sum = rank_graph.local.loss_sum;
    variant.item_count = rank_graph.local.item_count;
    variant.grad_norm = rank_graph.local.grad_norm;
    variant.correct = rank_graph.local.correct;
    settle_updates(variant.graph, rank_graph.phases);
    variant.phases = order_phases(variant.graph, rank_graph.phases);
    connect_host(variant);
    for (const auto& [name, piece] : source.pieces) {
      if (variant.graph.find_value(name)) {
        program.pieces.emplace(name, piece);
      }
    }
    program.variants.push_back(std::move(variant));
  }
  program.micro_batches = micro_batches(share, first_sample_of(plan_, share.data_rank));
  program.cells = rank_cells(plan_,
                             program.coordinates.stage,
                             static_cast<int>(share.num_micro_batches),
                             program.variants.at(0));
  return program;
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
