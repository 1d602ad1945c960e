// The rest of PlanSearch where there is no plan: what comes nearest, whether cutting more tensors
// helps, and which pins leave nothing.
#include <algorithm>

#include "graph/base/error.h"
#include "planner/parallel_for.h"
#include "planner/plan_search.h"

namespace trainrt {

// The candidate that is least short of memory explains an infeasible request.
void PlanSearch::keep_nearest(const Candidate& candidate) {
  int64_t missing = 0;
  int rank = 0;
  for (const StageMemory& stage : candidate.prediction.stages) {
    if (stage.missing_bytes() > missing) {
      missing = stage.missing_bytes();
      rank = stage.rank;
    }
  }
  if (result_.missing_bytes == 0 || missing < result_.missing_bytes) {
    result_.missing_bytes = missing;
    result_.missing_rank = rank;
    nearest_ = candidate;
  }
  const Group group = {candidate.layout.tensor, candidate.layout.pipeline};
  const auto known = shortage_.find(group);
  if (known == shortage_.end() || missing < known->second) {
    shortage_[group] = missing;
    Candidate& rejected = too_large_[group];
    rejected = candidate;
    rejected.rejected_because = concat("does not fit: ", missing, " bytes short on rank ", rank);
  }
}

// What is too large by sums has no cuts yet, from which to tell what is missing where. With a plan
// at hand the slowest few of each kind, which save the most memory, are enough to tell.
void PlanSearch::explain_too_large() {
  constexpr int kOfEachKind = 8;
  std::map<Group, int> told;
  std::vector<size_t> shapes;
  for (size_t i = too_large_shapes_.size(); i-- > 0;) {
    const Shape& shape = shapes_[too_large_shapes_[i]];
    const Degrees& d = degrees_[static_cast<size_t>(shape.degrees)];
    const Group group = {d.tensor, d.pipeline};
    if (result_.feasible && (best_of_group_.count(group) != 0 || ++told[group] > kOfEachKind)) {
      continue;
    }
    shapes.push_back(too_large_shapes_[i]);
  }
  constexpr size_t kTogether = 64;  // that are held at a time
  for (size_t first = 0; first < shapes.size(); first += kTogether) {
    std::vector<Candidate> fitted(std::min(kTogether, shapes.size() - first));
    parallel_for(fitted.size(), [&](size_t i, size_t worker) {
      fit(shapes_[shapes[first + i]], &fitted[i], &caches_[worker]);
    });
    for (const Candidate& candidate : fitted) {
      keep_nearest(candidate);
    }
  }
}

// What the nearest plan lacks, as a part of what it takes.
double PlanSearch::nearest_shortage() const {
  double most = 0;
  for (const StageMemory& stage : nearest_.prediction.stages) {
    most = std::max(most,
                    static_cast<double>(stage.missing_bytes()) /
                        static_cast<double>(std::max<int64_t>(1, stage.peak_bytes)));
  }
  return most;
}

// Nothing fits by the estimates, which may be above what programs need: whether the programs of the
// best few that lack a little do fit.
void PlanSearch::doubt_estimates() {
  constexpr double kLeastError = 0.95;  // of programs to estimates
  constexpr int kMostTried = 8;
  if (nearest_shortage() > 1 - kLeastError) {
    return;
  }
  estimate_error_ = kLeastError;
  visits_.clear();
  for (int tried = 0; tried < kMostTried; ++tried) {
    explore();
    if (best_ >= 1e300) {
      break;
    }
    if (settle_memory(&chosen_)) {
      return;
    }
  }
  estimate_error_ = 1;
  for (auto& [kind, errors] : memory_errors_) {
    std::transform(errors.begin(), errors.end(), errors.begin(), [](double error) {
      return std::max(error, 1.0);
    });
  }
  visits_.clear();
  explore();
}

// Nothing fits where tensors are cut for speed: the same with as many of them cut as there are.
void PlanSearch::split_for_memory() {
  splits_for_memory_ = true;
  profile_index_.clear();
  orders_.clear();
  shapes_.clear();
  visits_.clear();
  banned_.clear();
  make_first_profiles();
  add_all_degrees();
  explore_all();
  settle();
  if (best_ >= 1e300 && !request_.only_feasible) {
    explain_too_large();
  }
}

// There is not a single shape: says which pins leave none.
void PlanSearch::refuse_pins(int num_blocks) const {
  const PlanPins& pins = request_.pins;
  if (degrees_.empty()) {
    TRAINRT_FAIL(kInvalidArgument,
                 "no data, tensor and pipeline degrees agree with the pins: ",
                 request_.topology.num_devices(),
                 " devices, batch ",
                 request_.global_batch,
                 ", and a model of ",
                 num_blocks,
                 " blocks that pipeline stages can be cut at",
                 pins.shares.empty()
                     ? ""
                     : concat(", and --shares has entries for ", pins.shares.size(), " data ranks"),
                 pins.sequence_parallel.value_or(false)
                     ? ", and --sequence-parallel needs a tensor group of two ranks or more"
                     : "");
  }
  if (too_few_for_2bw_) {
    TRAINRT_FAIL(kInvalidArgument,
                 "--schedule 2bw needs a micro-batch for each of ",
                 too_few_for_2bw_->first,
                 " pipeline stages, and a data rank has ",
                 too_few_for_2bw_->second,
                 " of them: raise --batch-size, or lower --micro-batch-size, --pp or --dp");
  }
  TRAINRT_FAIL(kInvalidArgument,
               "no plan agrees with the pins: the model has ",
               num_blocks,
               " blocks that pipeline stages can be cut at, and ",
               pins.tensor.value_or(1) > 1
                   ? concat("no tensor that ", *pins.tensor, " ranks could share")
                   : concat("the batch ", request_.global_batch, " samples"));
}

}  // namespace trainrt
