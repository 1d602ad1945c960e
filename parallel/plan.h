// What the planner decides and a user can write by hand (CONTRACT section 2): how a training graph
// is split over devices. A Plan costs nothing and knows no device properties; partition() turns it
// into one Program per rank.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/shape.h"
#include "parallel/schedule.h"

namespace trainrt {

// Where a tensor lives along one mesh axis.
struct Placement {
  enum class Kind : uint8_t { kReplicate, kShard, kPartial };
  Kind kind = Kind::kReplicate;
  int dim = -1;       // kShard only
  int64_t units = 0;  // kShard: equal parts of the dim that are dealt out whole; 0: its elements

  static Placement replicate() { return {}; }
  static Placement shard(int dim, int64_t units = 0) { return {Kind::kShard, dim, units}; }
  static Placement partial() { return {Kind::kPartial, -1, 0}; }
  bool operator==(const Placement&) const = default;
};
std::string placement_string(const Placement& placement);  // "shard(1)", "replicate", "partial"

struct PlanDevice {
  int rank = 0;
  std::string host;
  std::string device;
};

// The samples of one data rank: consecutive runs, cut into micro-batches of which the last may be
// short. num_samples may be 0 (an idle rank).
struct DataShare {
  int data_rank = 0;
  int64_t num_samples = 0;
  int64_t micro_batch_size = 0;
  int64_t num_micro_batches = 0;
};

enum class RecomputeMode : uint8_t { kNone, kSelective, kFull };
const char* recompute_name(RecomputeMode mode);

// Nodes of a stage, [first_node, last_node], that are recomputed otherwise than the rest of it.
struct RecomputeRun {
  int first_node = 0;
  int last_node = 0;
  RecomputeMode mode = RecomputeMode::kNone;
  bool operator==(const RecomputeRun&) const = default;
};

struct PlanStage {
  int virtual_stage = 0;
  int rank_stage = 0;  // pipeline rank that owns it
  int first_node = 0;  // [first_node, last_node]: topological order of the imported graph
  int last_node = 0;
  RecomputeMode recompute = RecomputeMode::kNone;
  std::vector<std::string> recompute_nodes;  // stable node names that are run again in backward
  std::vector<RecomputeRun> recompute_runs = {};  // ascending, apart from each other

  // Of a node of the imported graph.
  RecomputeMode recompute_of(int node) const;
  // Whether anything runs again.
  bool recomputes() const;
};

struct TensorPlacement {
  Placement data;
  Placement tensor;
};

struct Plan {
  int version = 1;
  std::string model_hash;
  std::map<std::string, int64_t> bind;
  std::string precision = "fp32";
  int64_t global_batch = 0;      // samples per step
  int64_t micro_batch_size = 0;  // the largest of shares
  int data_parallel = 1;
  int tensor_parallel = 1;
  int pipeline_parallel = 1;
  int virtual_stages = 1;
  ScheduleKind schedule = ScheduleKind::k1F1B;
  int zero_stage = 0;
  bool sequence_parallel = false;
  bool offload_optimizer = false;
  bool exact_reduction = false;  // --reduction exact, over
  int64_t logical_shards = 8;    // this many aligned parts of the batch
  bool sync_batch_norm = false;  // BatchNorm's statistics are those of all data ranks
  std::vector<PlanDevice> devices;
  std::vector<DataShare> shares;
  std::vector<PlanStage> stages;
  std::map<std::string, TensorPlacement> placements;
  // Products and convolutions, by node name, whose local dims are padded to a multiple
  // (parallel/passes/padding.h). Nodes that are not named run as they are.
  std::map<std::string, int64_t> padding;

  int world_size() const { return data_parallel * tensor_parallel * pipeline_parallel; }
};

// rank = (stage * data_parallel + data_rank) * tensor_parallel + tensor_rank: the heaviest traffic
// (tensor) between neighbours.
struct RankCoordinates {
  int stage = 0;
  int data_rank = 0;
  int tensor_rank = 0;
};
RankCoordinates rank_coordinates(const Plan& plan, int rank);
int rank_of(const Plan& plan, const RankCoordinates& coordinates);

// JSON as in CONTRACT section 2. plan_from_json throws kInvalidArgument naming key, value and what
// was wanted; unknown keys are errors with near names.
std::string plan_to_json(const Plan& plan);
Plan plan_from_json(const std::string& text);

// The plan of one device: everything in one stage, one share.
Plan single_device_plan(int64_t global_batch, int64_t micro_batch_size, int num_graph_nodes);

}  // namespace trainrt
