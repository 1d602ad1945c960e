// The search: every combination of degrees, schedule, micro-batch size and memory saving gets a
// lower bound that no cut and no share can beat; in order of it, cuts and shares are fitted and the
// step is replayed, until the bound passes the best replay.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "planner/candidates.h"
#include "planner/layout_fit.h"
#include "planner/model_sizes.h"
#include "planner/planner.h"
#include "planner/step_bound.h"

namespace trainrt {

class PlanSearch {
 public:
  // `models`: of request.graph; outlives the search, and may serve others.
  PlanSearch(const PlanRequest& request, ModelSizes* models);
  PlanResult run();

 private:
  // A point of the search space, all but cuts and shares.
  struct Shape {
    int degrees = 0;  // indices
    int order = 0;
    int profile = 0;
    int virtual_stages = 1;
    ScheduleKind schedule = ScheduleKind::k1F1B;
    RecomputeMode recompute = RecomputeMode::kNone;
    int zero_stage = 0;
    double bound_seconds = 0;
    double bound = 0;  // of the objective's value
  };
  using Group = std::pair<int, int>;  // tensor and pipeline degree: what alternatives differ in

  // The model and its profiles.
  const ModelBlocks& model_at(int64_t micro_batch) const;
  int profile_of(int64_t micro_batch, const Degrees& d, bool sequence_parallel);
  const ModelProfile& profile(int index) const;

  // The space.
  void add_degrees(int degrees);
  void add_shapes(int degrees, int order, int profile_index);
  std::vector<std::pair<int, ScheduleKind>> schedules(const Degrees& d, int blocks) const;
  std::vector<RecomputeMode> recomputes() const;
  std::vector<int> zero_stages(const Degrees& d) const;
  // `place`: with the devices.
  Layout layout_of(const Shape& shape, bool place = true) const;

  // One point.
  StepRequest step_request(const Candidate& candidate) const;
  int num_micro_batches(int64_t micro_batch) const;
  std::vector<int> fixed_counts(const Layout& layout) const;
  std::vector<int> least_counts(const Layout& layout) const;
  LayoutFit layout_fit(const StepRequest& request, Candidate* candidate);
  bool settle_memory(Candidate* candidate);
  const CostModel* cpu_cost(int device);
  void replay_programs_of(Candidate* candidate);
  bool fit(const Shape& shape, Candidate* candidate);
  void write_shares(Candidate* candidate) const;
  bool proven_too_large(const Shape& shape) const;
  void keep_nearest(const Candidate& candidate);
  double value_of(const Candidate& candidate, double seconds) const;
  double hourly_price(const Layout& layout) const;

  // The decision.
  void explore();
  void take(Candidate candidate);
  void improve();
  void decide();
  void explain_too_large();
  void list_alternatives();

  const PlanRequest& request_;
  ModelSizes* models_;
  BlockPins block_pins_;
  bool uniform_;
  Engine engine_;
  mutable PriceCache cache_;
  std::map<int, CostModel> cpu_costs_;  // by device type
  LayoutFit::CutCache balanced_;
  StepBounds bounds_;
  std::map<std::tuple<int64_t, int, bool>, int> profile_index_;
  std::vector<std::unique_ptr<GraphProfile>> profiles_;
  std::vector<Degrees> degrees_;
  std::vector<std::vector<std::vector<int>>> orders_;  // by degrees
  std::vector<Shape> shapes_;                          // by bound
  std::vector<size_t> too_large_shapes_;

  double best_ = 1e300;  // value of the best replay
  double best_seconds_ = 1e300;
  Candidate chosen_;
  std::vector<Candidate> replayed_;
  std::map<Group, Candidate> best_of_group_;  // that fit
  std::map<Group, Candidate> too_large_;      // least short of memory
  std::map<Group, int64_t> shortage_;
  Candidate nearest_;
  // The programs of a refused candidate need at least this many times the estimate. Where that is
  // above 1, candidates that would not fit with it are refused uncompiled.
  double least_error_ = 1;
  int64_t num_replayed_ = 0;
  PlanResult result_;
};

// What separates a plan from the chosen one, for `rejected_because`.
std::string why_slower(const StepPrediction& other, const StepPrediction& chosen);

}  // namespace trainrt
