// The rest of PlanSearch where there is no plan: what comes nearest, whether cutting more tensors
// helps, and which pins leave nothing.
#include <algorithm>

#include "graph/base/error.h"
#include "planner/parallel_for.h"
#include "planner/plan_search.h"
#include "planner/shared_shardings.h"

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

// What a candidate lacks, as a part of what it takes.
double PlanSearch::shortage_of(const Candidate& candidate) {
  double most = 0;
  for (const StageMemory& stage : candidate.prediction.stages) {
    most = std::max(most,
                    static_cast<double>(stage.missing_bytes()) /
                        static_cast<double>(std::max<int64_t>(1, stage.peak_bytes)));
  }
  return most;
}

// What might win and whose single stage the estimate refuses, though a program that takes
// `least_error` of it would fit: the fastest, or where nothing fits the nearest. None of `doubted`,
// whose estimates are as good as programs.
std::optional<Candidate> PlanSearch::doubtful_stage(double least_error,
                                                    const std::set<DoubtKind>& doubted) {
  std::optional<Candidate> found;
  double shortage = 1 - least_error;
  for (size_t i = 0; i < shapes_.size() && shapes_[i].bound < best_; ++i) {
    const auto visited = visits_.find(i);
    if (degrees_[static_cast<size_t>(shapes_[i].degrees)].pipeline > 1 || banned_.count(i) != 0 ||
        visited == visits_.end() || visited->second.fits) {
      continue;
    }
    Candidate candidate;
    fit(shapes_[i], &candidate, &caches_[0]);
    candidate.shape = i;
    if (shortage_of(candidate) < shortage && !doubted.contains(doubt_kind(candidate))) {
      shortage = shortage_of(candidate);
      found = std::move(candidate);
      if (best_ < 1e300) {
        break;
      }
    }
  }
  return found;
}

PlanSearch::DoubtKind PlanSearch::doubt_kind(const Candidate& candidate) {
  return {memory_kind(candidate), strongest_recompute(candidate.layout, 0)};
}

// How many times its estimate a single stage's program needs; nothing where that takes too long.
std::optional<double> PlanSearch::program_error(Candidate* candidate) {
  try {
    if (const std::optional<std::vector<RankMemory>> found = programs_memory(candidate)) {
      const std::vector<StageMemory> stages =
          stages_of_ranks(*found, request_.topology, candidate->layout);
      return static_cast<double>(stages[0].peak_bytes) /
             static_cast<double>(candidate->prediction.stages[0].peak_bytes);
    }
  } catch (const Error&) {
    banned_.insert(candidate->shape);
  }
  return std::nullopt;
}

// The estimate of a single stage may be a third above what its program needs: whether what might be
// the fastest, or comes nearest where nothing fits, is refused by it alone.
void PlanSearch::doubt_single_stages() {
  constexpr double kLeastError = 0.6;  // of programs to estimates, at first
  constexpr double kAlike = 0.97;      // programs of other kinds: no less than so many times that
  const int most = !request_.programs ? 0 : request_.memory_where_tight ? 2 : 4;  // 0.1 s each
  std::set<DoubtKind> doubted;
  double least_error = kLeastError;
  for (int compiled = 0; compiled < most; ++compiled) {
    std::optional<Candidate> candidate = doubtful_stage(least_error, doubted);
    const std::optional<double> error = candidate ? program_error(&*candidate) : std::nullopt;
    if (!error) {
      return;
    }
    const DoubtKind kind = doubt_kind(*candidate);
    doubted.insert(kind);
    least_error = kAlike * *error;
    std::array<double, 3> errors = memory_error(*candidate);
    double& known = errors[static_cast<size_t>(kind.second)];
    if (*error >= known) {
      continue;
    }
    known = *error;
    memory_errors_[kind.first] = errors;
    std::erase_if(visits_, [&](const auto& visited) {
      return visited.second.too_large && shapes_[visited.first].profile == candidate->profile;
    });
    explore();
    settle();
  }
}

// Nothing fits by the estimates, which may be above what programs need: whether the programs of the
// best few that lack a little do fit.
void PlanSearch::doubt_estimates() {
  constexpr double kLeastError = 0.95;  // of programs to estimates
  constexpr int kMostTried = 8;
  if (shortage_of(nearest_) > 1 - kLeastError) {
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

// Takes the candidate's memory from its programs, where they can be compiled; whether it fits.
bool PlanSearch::settle_by_programs(Candidate* candidate) {
  try {
    if (std::optional<std::vector<RankMemory>> found = programs_memory(candidate)) {
      candidate->rank_memory = std::move(*found);
    }
  } catch (const Error&) {  // what cannot be carried out is told apart when it is the best
  }
  if (candidate->rank_memory.empty()) {
    return false;
  }
  const std::vector<StageMemory> stages =
      stages_of_ranks(candidate->rank_memory, request_.topology, candidate->layout);
  candidate->prediction.stages = stages;
  if (!candidate->prediction.fits()) {
    return false;
  }
  candidate->prediction = predict_step(step_request(*candidate));
  candidate->prediction.stages = stages;
  return true;
}

// What the nearest plan lacks by its programs, and whether one of other degrees fits by its own:
// the estimates may be a third above, and not for all alike.
void PlanSearch::settle_nearest() {
  constexpr double kMostDoubted = 0.6;  // of what a candidate takes
  constexpr size_t kMostOthers = 4;
  if (nearest_.layout.first_block.empty()) {  // what fits by the estimates cannot be carried out
    return;
  }
  std::vector<Candidate> others;
  for (const auto& [group, candidate] : too_large_) {
    if (group != Group(nearest_.layout.tensor, nearest_.layout.pipeline) &&
        shortage_of(candidate) < kMostDoubted) {
      others.push_back(candidate);
    }
  }
  std::stable_sort(others.begin(), others.end(), [this](const Candidate& a, const Candidate& b) {
    return shortage_of(a) < shortage_of(b);
  });
  others.resize(std::min(others.size(), kMostOthers));
  const auto take = [this](const Candidate& candidate) {
    const double value = value_of(candidate, candidate.prediction.seconds);
    if (value < best_) {
      chosen_ = candidate;
      best_seconds_ = candidate.prediction.seconds;
      best_ = value;
    }
  };
  const bool fits = settle_by_programs(&nearest_);
  if (!nearest_.rank_memory.empty()) {
    result_.missing_bytes = 0;
    keep_nearest(Candidate(nearest_));
  }
  if (fits) {
    take(nearest_);
  }
  for (Candidate& other : others) {
    if (settle_by_programs(&other)) {
      take(other);
    }
  }
  if (best_ < 1e300) {  // of all shapes, none of which the search has let through
    result_.lower_bound = best_seconds_;
    for (const Shape& shape : shapes_) {
      result_.lower_bound = std::min(result_.lower_bound, shape.bound_seconds);
    }
  }
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
  const int64_t virtual_stages = pins.virtual_stages.value_or(1);
  const int64_t stages = pins.pipeline.value_or(1) * virtual_stages;
  TRAINRT_REQUIRE(stages <= num_blocks,
                  kInvalidArgument,
                  "--pp ",
                  pins.pipeline.value_or(1),
                  virtual_stages > 1 ? concat(" x --virtual-stages ", virtual_stages) : "",
                  " asks for ",
                  stages,
                  " stages, and the model has ",
                  num_blocks,
                  " blocks that they can be cut between; lower ",
                  virtual_stages > 1 ? "either" : "--pp");
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
  const bool none_shared = std::all_of(degrees_.begin(), degrees_.end(), [this](const Degrees& d) {
    return d.tensor > 1 && profiles_.empty();
  });
  if (none_shared) {
    const int64_t most = most_tensor_ranks(model_at(pins.micro_batch.value_or(1)).blocks);
    TRAINRT_FAIL(kInvalidArgument,
                 pins.tensor ? "--tp " : "a tensor degree of ",
                 degrees_[0].tensor,
                 pins.tensor ? "" : ", which the pins leave,",
                 " has no tensor to share: ",
                 most > 1 ? concat("no dim of a weight has a part for more than ", most, " ranks")
                          : "no operator with weights can be cut",
                 "; ",
                 pins.tensor
                     ? concat("lower --tp", most > 1 ? concat(" to ", most, " or less") : "")
                     : "raise --dp or --pp");
  }
  TRAINRT_FAIL(kInvalidArgument,
               "no plan agrees with the pins: the model has ",
               num_blocks,
               " blocks that pipeline stages can be cut at, and the batch ",
               request_.global_batch,
               " samples");
}

}  // namespace trainrt
