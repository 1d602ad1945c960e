// Training graph + cluster -> the plan that trains fastest among those that fit, with reasons.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "graph/training_graph.h"
#include "parallel/plan.h"
#include "parallel/topology.h"
#include "planner/graph_profile.h"
#include "planner/model_sizes.h"
#include "planner/plan_pins.h"
#include "planner/short_programs.h"
#include "planner/step_cost.h"

namespace trainrt {

enum class Objective : uint8_t { kThroughput, kMemory, kDevices, kCost };

struct PlanRequest {
  // With gradient accumulation.
  ModelSource model;
  Topology topology;
  std::string precision = "fp32";
  int64_t global_batch = 1;
  double tokens_per_sample = 0;  // 0: from the graph's token inputs, if it has any
  std::string model_hash;
  std::map<std::string, int64_t> bind;
  PlanPins pins;
  // Where the process of each rank is, of a run of several: rank r has device r or another of its
  // place. Empty: ranks may have any device.
  std::vector<std::string> places;
  // What a run compiles: the training graph in the run's precision, and each device's spec. Without
  // them memory stays an estimate.
  TrainingGraphFactory programs;
  ProgramSource program_source;  // optional: the same in two halves, for models too large for that
  std::function<DeviceSpec(const Topology& topology, int device)> device_spec;
  // Programs are compiled only where the estimate comes near the limit: nobody reads the figure.
  bool memory_where_tight = false;
  // Asks whether anything fits; what does not is not explained.
  bool only_feasible = false;
  bool split_for_memory = false;  // tensors are cut as often as they can be, whatever that costs
  int num_nodes = 0;              // of the imported graph; 0: from the training graph
  Objective objective = Objective::kThroughput;
  std::map<std::string, double> price;  // per device-hour, by type name
  // Search again for what would change the answer, after searches of at most so many candidates.
  int64_t what_if_candidates = 0;
};

struct Candidate {
  Layout layout;
  std::vector<DataShare> shares;
  StepPrediction prediction;
  double least_seconds = 0;             // no other cuts and shares take less
  std::vector<RankMemory> rank_memory;  // of the programs, by rank; empty: estimated by stage
  int profile = 0;                      // index into PlanResult::profiles
  std::vector<int> rank_profiles;       // by data rank, where micro-batches differ in size
  size_t shape = 0;                     // of the search
  std::string rejected_because;

  bool memory_is_exact() const { return !rank_memory.empty(); }
  int64_t peak_bytes() const;  // of the rank that takes most, which need not lack most
};

// What the search answers when one thing is different.
struct WhatIf {
  std::string change;
  bool feasible = false;
  Layout layout;
  double seconds = 0;
  double samples_per_second = 0;
  double rate_change = 0;  // samples/s relative to the chosen plan's, less 1
  std::string effect;      // in words
};

struct PlanResult {
  bool feasible = false;
  Candidate chosen;               // when infeasible: the candidate that is least short of memory
  bool split_for_memory = false;  // as PlanRequest has it: tried where nothing else fitted
  Plan plan;
  std::vector<Candidate> alternatives;
  std::vector<std::shared_ptr<const GraphProfile>> profiles;
  Engine engine;
  int64_t candidates = 0;
  int64_t pruned = 0;
  // Of the chosen plan's time by its programs, where they are priced (CPUs), over the search's own
  // sums. What the search alone has timed is put in these terms: the bound, alternatives, what-ifs.
  double programs_factor = 1;
  double lower_bound = 0;     // no plan of the searched space is faster
  double value = 0;           // of the objective, by the search's own sums
  int64_t missing_bytes = 0;  // infeasible: by how much, on `missing_rank`
  int missing_rank = 0;
  // Why the pipeline of a schedule that goes on from step to step drains at the end of each
  // (parallel/passes/run_on.h); "": it does not, or the schedule is another.
  std::string drains_because;
  std::vector<std::string> remedies;  // changes that would make it fit
  std::vector<WhatIf> what_if;        // PlanRequest::what_if
  // What it was found with, for those who would not wait until all of that is freed.
  std::shared_ptr<const void> remains;
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
