// What the user has fixed, by flags, by a plan file or by the plan that a model carries; the search
// fills in the rest.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "parallel/plan.h"
#include "parallel/topology.h"
#include "planner/block_finder.h"
#include "planner/step_cost.h"

namespace trainrt {

struct PlanPins {
  std::optional<int> data, tensor, pipeline, virtual_stages, zero_stage;
  std::optional<ScheduleKind> schedule;
  std::optional<RecomputeMode> recompute;
  std::optional<bool> sequence_parallel;
  std::optional<int64_t> micro_batch;
  std::vector<double> shares;  // in this proportion
  bool offload_optimizer = false;

  // What only a whole plan says.
  std::string from;  // whose plan it is, for messages
  std::vector<PlanStage> stages;
  bool stage_recompute = false;  // `stages` says what is run again, too
  std::vector<DataShare> data_shares;
  std::map<std::string, TensorPlacement> placements;
  std::map<std::string, int64_t> padding;
  std::vector<PlanDevice> devices;
  std::vector<int> device_order;  // `devices` as indices into Topology::devices, by rank
  bool exact_reduction = false;
  int64_t logical_shards = 8;
  bool sync_batch_norm = false;

  // The cuts, placements and paddings that the model's blocks have to follow.
  BlockPins block_pins() const;
  bool splits_tensors() const;  // some tensor has to be cut over the tensor group
};

// The keys at the top of a plan file: what it leaves out is open.
std::set<std::string> stated_plan_keys(const std::string& json);

// Adds what `plan` says under the keys `stated` to what the flags have fixed. `where` names the
// plan in messages. Throws kInvalidArgument when it contradicts a flag, itself or the cluster, with
// both figures.
void pin_plan(const Plan& plan,
              const std::set<std::string>& stated,
              const std::string& where,
              const Topology& topology,
              PlanPins* pins);

// Throws kInvalidArgument when the pins name nodes or tensors that the model does not have, or cut
// what cannot be cut. `num_nodes`: of the imported graph, as far as known.
void check_model_pins(const PlanPins& pins, const Graph& graph, int num_nodes);

// What a plan's stages and shares make of a layout: recomputation by block (empty where it is open,
// or the same everywhere), the first block of every virtual stage, micro-batches by data rank, cut
// as the pinned reduction wants them.
std::vector<RecomputeMode> pinned_recompute(const PlanPins& pins,
                                            const std::vector<int>& last_source);
std::vector<int> pinned_cuts(const PlanPins& pins, const std::vector<int>& last_source);
void take_shares(const std::vector<DataShare>& shares, const PlanPins& pins, Layout* layout);

}  // namespace trainrt
