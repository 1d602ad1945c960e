// One rank's instructions: what the executor runs and the simulator prices. Compiled from a
// training graph and a Plan by parallel/partition.
//
// A Program holds, for every micro-batch size that occurs on the rank (a last micro-batch may be
// short), a local Graph whose nodes are computation and communication alike, cut into phases:
// straight-line lists of nodes per (phase kind, virtual stage). A schedule orders (phase,
// micro-batch) cells. Persistent values have the same names in every variant and share one address.
#pragma once

#include <compare>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/kernel.h"
#include "graph/op_def.h"
#include "parallel/mesh_axis.h"
#include "parallel/plan.h"
#include "parallel/schedule.h"

namespace trainrt {

struct Phase {
  PhaseKind kind = PhaseKind::kForward;
  int virtual_stage = 0;
  std::vector<NodeId> nodes;   // in execution order, ids into the variant's graph
  std::vector<ValueId> feeds;  // kInput values the host writes before the phase runs
  std::vector<ValueId>
      fetches;  // values the host reads after it: loss_sum, item_count, outputs ...
};

// The program at one micro-batch size.
struct ProgramVariant {
  int64_t micro_batch_size = 0;
  Graph graph;
  std::vector<Phase> phases;
  ValueId loss_sum = kNoValue;  // where this rank computes them; kNoValue elsewhere
  ValueId item_count = kNoValue;
  ValueId grad_norm = kNoValue;
  ValueId correct = kNoValue;

  const Phase* find_phase(PhaseKind kind, int virtual_stage) const;
};

// What a micro-batch is compiled for.
struct MicroBatchShape {
  int64_t num_samples = 0;
  int64_t length = 0;  // tokens of each sample; 0: as many as the model's inputs are bound to
  auto operator<=>(const MicroBatchShape&) const = default;
};

// One micro-batch of the rank: which variant runs it and which samples of the step it holds. One
// without samples takes part in the collectives of the other data ranks' (parallel/silent_variant).
struct MicroBatch {
  int variant = 0;
  int64_t first_sample = 0;  // index within the step's global batch
  int64_t num_samples = 0;
  int64_t shard = 0;   // logical shard of the step, which loss and items are counted by
  int64_t length = 0;  // MicroBatchShape::length
};

// What a rank does in one step, where that differs from step to step.
struct StepWork {
  std::vector<MicroBatch> micro_batches;
  std::vector<Cell> cells;
  int once_variant = 0;  // runs the phases that run once per step
};

// The runtime feeds it like those of graph.h: the micro-batch's number on its rank, an int64
// scalar.
inline constexpr const char* kMicroBatchInput = "trainrt.micro_batch";

// Which persistent values of a program's variants are one tensor: those of one name, but for
// constants that differ between micro-batch sizes.
std::string persistent_key(const Value& value);

struct Program {
  int rank = 0;
  int world_size = 1;
  RankCoordinates coordinates;
  DeviceSpec device;
  // [0] has the phases that run once per step. The others are of micro-batches, and so is [0], of
  // the largest size or, where gradients are summed within its backward, of the step's last one.
  std::vector<ProgramVariant> variants;
  std::vector<MicroBatch> micro_batches;  // in order
  int64_t num_shards = 1;                 // logical shards of the step (--reduction exact)
  bool offload_optimizer = false;         // optimizer state lies in the host's memory
  // Persistent tensors of which this rank holds a piece only, by name.
  std::map<std::string, TensorPiece> pieces;
  std::vector<Cell> cells;  // this rank's row: C, G, F, B, W, R, U in order
  // Where steps go over into each other (parallel/passes/run_on.h): the rows of StepWindow after
  // kWhole, which is `cells`; what a forward of the next step's batch reads, by the name of what it
  // would read after this step's update; and how many of them are in flight at that time. Empty and
  // 0 elsewhere.
  std::vector<std::vector<Cell>> windows;
  std::map<std::string, std::string> newer_versions;
  int num_ahead = 0;
  // Of programs made for shapes, whose micro_batches and cells stand for the largest step: variants
  // of micro-batches without samples, and of a step without any. -1: none.
  int silent_variant = -1;
  int idle_variant = -1;

  // Virtual stages of this rank, ascending; the index into it is the `local stage` of MemoryPlan.
  std::vector<int> local_stages() const;
  // Most micro-batches of the stage in flight at once.
  int num_stash_slots(int virtual_stage) const;
  bool runs_on() const { return !windows.empty(); }
  const std::vector<Cell>& row(StepWindow window) const;
};

// Communication as nodes. Attribute "group": "data", "tensor" or "pipeline" names the mesh axis,
// the communicator of which runs it. Send/Recv carry "peer" (a rank of the group) and "tag". An
// AllReduce, ReduceScatter, AllGather or AllToAll may take several tensors
// (parallel/passes/buckets).
namespace comm_op {
inline constexpr const char* kAllReduce = "AllReduce";  // attr reduction: sum|max|min
// attr axis, sizes; in_place: the own segment comes to lie where the whole tensor has begun
inline constexpr const char* kReduceScatter = "ReduceScatter";
inline constexpr const char* kAllGather = "AllGather";  // attr axis, sizes
inline constexpr const char* kAllToAll = "AllToAll";
inline constexpr const char* kBroadcast = "Broadcast";  // attr root
inline constexpr const char* kSend = "Send";
inline constexpr const char* kNumbers = "numbers";  // attribute: how many a Send holds, packed
inline constexpr const char* kRecv = "Recv";
}  // namespace comm_op
bool is_communication(const std::string& op_type);
// Which inputs the node may write its outputs over: its operator's, each tensor of a bucket over
// itself, and pairs (output, input) in its attribute `inplace`.
std::vector<Inplace> inplace_of(const Node& node);

// The kind of phase that holds the update: without accumulation it is part of the only backward.
// None on a rank without parameters.
std::optional<PhaseKind> updating_phase(const Program& program);

std::string program_string(const Program& program);

}  // namespace trainrt
