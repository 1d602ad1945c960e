// Training graph + cluster -> the plan that trains fastest among those that fit, with reasons.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "graph/training_graph.h"
#include "parallel/plan.h"
#include "parallel/topology.h"
#include "planner/graph_profile.h"
#include "planner/step_cost.h"

namespace trainrt {

// What the user has fixed; the search fills in the rest.
struct PlanPins {
  std::optional<int> data, tensor, pipeline, virtual_stages, zero_stage;
  std::optional<ScheduleKind> schedule;
  std::optional<RecomputeMode> recompute;
  std::optional<bool> sequence_parallel;
  std::optional<int64_t> micro_batch;
  std::vector<double> shares;
  bool offload_optimizer = false;
};

enum class Objective : uint8_t { kThroughput, kMemory, kDevices, kCost };

struct PlanRequest {
  // The training graph at a micro-batch size, with gradient accumulation. Called from two threads.
  std::function<TrainingGraph(int64_t micro_batch)> graph;
  Topology topology;
  std::string precision = "fp32";
  int64_t global_batch = 1;
  double tokens_per_sample = 0;  // 0: from the graph's token inputs, if it has any
  std::string model_hash;
  std::map<std::string, int64_t> bind;
  PlanPins pins;
  Objective objective = Objective::kThroughput;
  std::map<std::string, double> price;  // per device-hour, by type name
  // Most samples of a micro-batch that the search builds a graph for.
  int64_t largest_micro_batch = 16;
};

struct Candidate {
  Layout layout;
  std::vector<DataShare> shares;
  StepPrediction prediction;
  double least_seconds = 0;  // no other cuts and shares take less
  int profile = 0;           // index into PlanResult::profiles
  std::string rejected_because;
};

struct PlanResult {
  bool feasible = false;
  Candidate chosen;  // when infeasible: the candidate that is least short of memory
  Plan plan;
  std::vector<Candidate> alternatives;
  std::vector<GraphProfile> profiles;
  Engine engine;
  int64_t candidates = 0;
  int64_t pruned = 0;
  double lower_bound = 0;     // no plan of the searched space is faster
  int64_t missing_bytes = 0;  // infeasible: by how much, on `missing_rank`
  int missing_rank = 0;
  std::vector<std::string> remedies;  // changes that would make it fit
  double gap() const { return lower_bound > 0 ? chosen.prediction.seconds / lower_bound - 1 : 0; }
};

// The plan that a candidate stands for; `profile` is the one it was priced with.
Plan plan_of(const PlanRequest& request, const Candidate& candidate, const GraphProfile& profile);

// Throws kInvalidArgument for pins that contradict each other, the model or the cluster.
PlanResult make_plan(const PlanRequest& request);

// Engine figures of our own programs at a precision: bytes of weights, gradients and optimizer
// state.
Engine own_engine(const std::string& precision, double optimizer_bytes_fp32);

}  // namespace trainrt
