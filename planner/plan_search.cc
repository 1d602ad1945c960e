// The sorted list of bounds makes the search exact but for cuts and shares: what is left out has a
// bound above a step that was replayed. Cuts and shares are exact in memory and in the longest
// stage (planner/layout_fit), and locally best under the replay.
#include "planner/plan_search.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "graph/base/error.h"
#include "parallel/passes/run_on.h"
#include "planner/layout_fit.h"
#include "planner/parallel_for.h"
#include "planner/step_memory.h"

namespace trainrt {

namespace {

// Other cuts than the balanced ones gain little where a rank has many blocks: a point whose bound
// at those, or whose step, exceeds the best step by more than this is given up.
double hopeless(const Candidate& candidate, const ModelProfile& profile) {
  const double part = static_cast<double>(candidate.layout.pipeline) / profile.num_blocks();
  constexpr int kManyBlocks = 64;
  return profile.num_blocks() < kManyBlocks ? 1.06 + 2 * part : 1.01 + part / 2;
}
constexpr int64_t kImproveReplays = 400;    // of one point
constexpr int64_t kImproveCells = 2000000;  // of the search

}  // namespace

PlanSearch::PlanSearch(const PlanRequest& request, SearchModel* model)
    : request_(request),
      model_(model),
      block_pins_(request.pins.block_pins()),
      uniform_(request.topology.is_uniform()),
      splits_first_(request.pins.placements.empty() &&
                    (request.split_for_memory || request.objective == Objective::kMemory)),
      caches_(most_workers()) {}

PlanResult PlanSearch::run(const Beside& beside) {
  check_pins(request_);
  find_reasons_to_drain();
  if (!request_.pins.micro_batch.has_value() && request_.global_batch >= 2) {
    model_->models.prepare();
  }
  const int num_blocks =
      static_cast<int>(model_at(request_.pins.micro_batch.value_or(1)).blocks.blocks.size());
  degrees_ = candidate_degrees(request_, num_blocks);
  splits_for_memory_ = splits_first_;
  make_first_profiles();
  add_all_degrees();
  if (shapes_.empty()) {
    refuse_pins(num_blocks);
  }
  explore_all();
  const auto rest = [this] { choose(); };
  if (beside && best_ < 1e300) {
    beside(static_cast<int64_t>(shapes_.size()), rest);
  } else {
    rest();
  }
  return std::move(result_);
}

void PlanSearch::choose() {
  settle();
  doubt_single_stages();
  if (best_ >= 1e300 && !request_.only_feasible) {
    explain_too_large();
    if (request_.programs && !request_.memory_where_tight) {
      doubt_estimates();
    }
  }
  // What the nearest plan may lack, as a part of what it takes, for more tensor ranks to mend it.
  int most_tensor = 1;
  for (const Degrees& d : degrees_) {
    most_tensor = std::max(most_tensor, d.tensor);
  }
  const double hopeless =
      std::max(0.5, 1 - static_cast<double>(nearest_.layout.tensor) / most_tensor);
  if (best_ >= 1e300 && !splits_for_memory_ && request_.pins.placements.empty() &&
      (request_.only_feasible || shortage_of(nearest_) < hopeless) && most_tensor > 1) {
    split_for_memory();
  }
  if (best_ >= 1e300 && request_.programs && !request_.only_feasible) {
    settle_nearest();
  }
  rank_by_programs();
  decide();
}

// By bound; what is known of a shape goes with it.
void PlanSearch::sort_shapes() {
  std::vector<size_t> order(shapes_.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [this](size_t a, size_t b) {
    return shapes_[a].bound < shapes_[b].bound;
  });
  std::vector<Shape> sorted;
  std::map<size_t, Visit> visits;
  for (size_t i = 0; i < order.size(); ++i) {
    sorted.push_back(shapes_[order[i]]);
    const auto known = visits_.find(order[i]);
    if (known != visits_.end()) {
      known->second.candidate.shape = i;
      visits.emplace(i, std::move(known->second));
    }
  }
  shapes_ = std::move(sorted);
  visits_ = std::move(visits);
}

void PlanSearch::explore_all() {
  sort_shapes();
  explore();
  if (add_paced_mixes()) {
    sort_shapes();
    explore();
  }
}

void PlanSearch::settle() {
  while (best_ < 1e300 && !settle_memory(&chosen_)) {
    explore();
  }
}

Layout PlanSearch::layout_of(const Shape& shape, bool place) const {
  const Degrees& d = degrees_[static_cast<size_t>(shape.degrees)];
  const ModelProfile& model = profile(shape.profile);
  Layout layout;
  layout.data = d.data;
  layout.tensor = d.tensor;
  layout.pipeline = d.pipeline;
  layout.virtual_stages = shape.virtual_stages;
  layout.schedule = shape.schedule;
  layout.zero_stage = shape.zero_stage;
  layout.recompute = shape.recompute;
  layout.recompute_as_needed = shape.as_needed;
  layout.block_recompute =
      pinned_recompute(request_.pins, profiles_[static_cast<size_t>(shape.profile)]->last_source);
  layout.sequence_parallel = model.sequence_parallel;
  layout.offload_optimizer = request_.pins.offload_optimizer;
  layout.sync_batch_norm = request_.pins.sync_batch_norm;
  if (request_.pins.exact_reduction) {
    layout.exact =
        exact_sums(request_.global_batch, d.data, model.micro_batch, request_.pins.logical_shards);
  }
  layout.micro_batch = model.micro_batch;
  for (const int own :
       shape.mix < 0 ? std::vector<int>{} : mixes_[static_cast<size_t>(shape.mix)]) {
    layout.micro_batch_sizes.push_back(profile(own).micro_batch);
  }
  if (place) {
    layout.devices = orders_[static_cast<size_t>(shape.degrees)][static_cast<size_t>(shape.order)];
    layout.device_order = shape.order;
  }
  const int64_t rest = request_.global_batch % layout.micro_batch;
  layout.last_micro_batch =
      d.data == 1 && num_micro_batches(layout.micro_batch) == 1 && rest != 0
          ? static_cast<double>(rest) / static_cast<double>(layout.micro_batch)
          : 1;
  return layout;
}

Candidate PlanSearch::candidate_of(const Shape& shape, bool place) const {
  Candidate candidate;
  candidate.profile = shape.profile;
  if (shape.mix >= 0) {
    candidate.rank_profiles = mixes_[static_cast<size_t>(shape.mix)];
  }
  candidate.layout = layout_of(shape, place);
  return candidate;
}

// Schedules whose steps go over into each other are chosen when they are pinned only.
void PlanSearch::find_reasons_to_drain() {
  const std::optional<ScheduleKind> pinned = request_.pins.schedule;
  if (!pinned.has_value() || !goes_on(*pinned) || model_->drains_because.has_value()) {
    return;
  }
  const TrainingGraph training = request_.model.training(request_.pins.micro_batch.value_or(1));
  Plan plan;
  plan.precision = request_.precision;
  std::array<std::string, 2>& reasons = model_->drains_because.emplace();
  for (size_t several = 0; several < reasons.size(); ++several) {
    plan.data_parallel = 1 + static_cast<int>(several);
    reasons[several] = reason_to_drain(plan, training.graph);
  }
}

const std::string& PlanSearch::drains_because(const Layout& layout) const {
  static const std::string none;
  return goes_on(layout.schedule) && layout.pipeline > 1
             ? (*model_->drains_because)[layout.data > 1 ? 1 : 0]
             : none;
}

StepRequest PlanSearch::step_request(const Candidate& candidate, Caches* caches) const {
  StepRequest step;
  step.profile = &profile(candidate.profile);
  for (const int own : candidate.rank_profiles) {
    step.rank_profiles.push_back(&profile(own));
  }
  step.topology = &request_.topology;
  step.engine = &engine_;
  step.precision = request_.precision;
  step.layout = &candidate.layout;
  step.uniform = uniform_;
  step.cache = &caches->prices;
  step.memory_error = memory_error(candidate);
  step.runs_on = drains_because(candidate.layout).empty();
  return step;
}

// For a candidate whose layout is to be fitted, as far as the pins leave it open.
LayoutFit PlanSearch::layout_fit(const StepRequest& request,
                                 Candidate* candidate,
                                 Caches* caches) const {
  Layout& layout = candidate->layout;
  LayoutFit fit(request,
                {layout.micro_batch_sizes.empty() ? num_micro_batches(layout.micro_batch)
                                                  : static_cast<int>(request_.global_batch),
                 micro_batches_together(layout.micro_batch)},
                // Shares that are cut are no longer open.
                layout.micro_batch_scales.empty() ? fixed_counts(layout) : layout.num_micro_batches,
                &caches->cuts,
                &layout);
  if (!request_.pins.data_shares.empty()) {
    take_shares(request_.pins.data_shares, request_.pins, &layout);
  }
  if (!request_.pins.stages.empty()) {
    fit.pin_cuts(pinned_cuts(request_.pins,
                             profiles_[static_cast<size_t>(candidate->profile)]->last_source));
  }
  return fit;
}

double PlanSearch::hourly_price(const Layout& layout) const {
  double hourly = 0;
  for (int rank = 0; request_.objective == Objective::kCost && rank < layout.world_size(); ++rank) {
    const auto found = request_.price.find(request_.topology.type_of(layout.device(rank)).name);
    hourly += found == request_.price.end() ? 1 : found->second;
  }
  return hourly;
}

// Of the objective, for a step of `seconds`.
double PlanSearch::value_of(const Candidate& candidate, double seconds) const {
  switch (request_.objective) {
    case Objective::kThroughput:
      return seconds;
    case Objective::kMemory:
      return static_cast<double>(candidate.prediction.peak_bytes());
    case Objective::kDevices:
      return candidate.layout.world_size() + 1e-9 * seconds;
    case Objective::kCost:
      return hourly_price(candidate.layout) * seconds / 3600;
  }
  return seconds;
}

void PlanSearch::explore() {
  best_ = best_seconds_ = 1e300;
  replayed_.clear();
  best_of_group_.clear();
  too_large_shapes_.clear();
  double least = 1e300;  // bound of what may be a plan
  size_t next = 0;
  for (; next < shapes_.size() && shapes_[next].bound < best_; ++next) {
    const Shape& shape = shapes_[next];
    if (banned_.count(next) != 0) {
      continue;
    }
    visit_from(next);
    Visit& visited = visits_.at(next);
    if (visited.too_large) {
      too_large_shapes_.push_back(next);
    } else if (visited.redundant) {
      continue;
    } else if (visited.fits) {
      least = std::min(least, shape.bound_seconds);
      take(&visited);
    } else {
      keep_nearest(visited.candidate);
      // Where a rank has one stage the fit is exact: no cut fits.
      if (shape.virtual_stages > 1 || !(uniform_ || !request_.pins.shares.empty())) {
        least = std::min(least, shape.bound_seconds);
      }
    }
  }
  for (; next < shapes_.size(); ++next) {
    least = std::min(least, shapes_[next].bound_seconds);
  }
  improve();
  result_.lower_bound = std::min(least, best_seconds_);
  result_.candidates = static_cast<int64_t>(shapes_.size());
  result_.pruned = result_.candidates - num_replayed_;
}

bool PlanSearch::may_win(const Candidate& candidate) const {
  return value_of(candidate, candidate.prediction.lower_bound) <
         hopeless(candidate, profile(candidate.profile)) * best_;
}

// Replays a fitted candidate, unless it cannot win.
void PlanSearch::take(Visit* visited) {
  Candidate& candidate = visited->candidate;
  Candidate& best_of_group = best_of_group_[{candidate.layout.tensor, candidate.layout.pipeline}];
  const bool is_new = best_of_group.layout.first_block.empty();
  if (!may_win(candidate)) {
    if (is_new) {
      best_of_group = candidate;
    }
    return;
  }
  if (!visited->replayed) {
    if (!visited->replay) {
      replay_from(candidate.shape);
    }
    visited->replayed = true;
    ++num_replayed_;
    candidate.prediction = std::move(*visited->replay);
    visited->replay.reset();
  }
  if (is_new || best_of_group.prediction.bound_only ||
      candidate.prediction.seconds < best_of_group.prediction.seconds) {
    best_of_group = candidate;
  }
  const double limit = hopeless(candidate, profile(candidate.profile));
  const double value = value_of(candidate, candidate.prediction.seconds);
  if (value < best_) {
    best_ = value;
    best_seconds_ = candidate.prediction.seconds;
    chosen_ = candidate;
  }
  if (value < limit * best_) {
    replayed_.push_back(candidate);
  }
}

// By the local search.
PlanSearch::Improved PlanSearch::improved(const Candidate& candidate, Caches* caches) const {
  Improved result{candidate, 0};
  const Layout& layout = result.candidate.layout;
  const StepRequest request = step_request(result.candidate, caches);
  const int64_t per_replay =
      int64_t{2} * layout.pipeline * layout.virtual_stages *
      *std::max_element(layout.num_micro_batches.begin(), layout.num_micro_batches.end());
  const auto budget = std::clamp<int64_t>(kImproveCells / 4 / per_replay, 1, kImproveReplays);
  // Shares in full micro-batches; then, where some are short, the cuts for those.
  uncut_shares(&result.candidate);
  for (bool again = true; again;) {
    LayoutFit fit = layout_fit(request, &result.candidate, caches);
    result.cells += fit.improve(static_cast<int>(budget)) * per_replay;
    again = layout.micro_batch_scales.empty();
    cut_shares(&result.candidate);
    again = again && !layout.micro_batch_scales.empty();
  }
  result.candidate.prediction = predict_step(request);
  return result;
}

// The replayed candidates, best first, while they may still win. Those that follow one are improved
// beside it, as far as there are cores; where that was for nothing, they stay as they are.
void PlanSearch::improve() {
  std::stable_sort(
      replayed_.begin(), replayed_.end(), [this](const Candidate& a, const Candidate& b) {
        return value_of(a, a.prediction.seconds) < value_of(b, b.prediction.seconds);
      });
  const auto hopes = [this](const Candidate& candidate) {
    return value_of(candidate, candidate.least_seconds) < best_;
  };
  int64_t cells = 0;
  for (size_t next = 0; next < replayed_.size() && cells <= kImproveCells; ++next) {
    if (!hopes(replayed_[next])) {
      continue;
    }
    const size_t shape = replayed_[next].shape;
    if (!visits_.at(shape).improved) {
      std::vector<const Candidate*> open;
      for (size_t i = next; i < replayed_.size() && open.size() < most_workers(); ++i) {
        if (hopes(replayed_[i]) && !visits_.at(replayed_[i].shape).improved) {
          open.push_back(&replayed_[i]);
        }
      }
      parallel_for(open.size(), [&](size_t i, size_t worker) {
        visits_.at(open[i]->shape).improved = improved(*open[i], &caches_[worker]);
      });
    }
    const Improved& found = *visits_.at(shape).improved;
    cells += found.cells;
    Candidate& candidate = replayed_[next];
    candidate = found.candidate;
    candidate.shape = shape;
    const double value = value_of(candidate, candidate.prediction.seconds);
    if (value < best_) {
      best_ = value;
      best_seconds_ = candidate.prediction.seconds;
      chosen_ = candidate;
    }
  }
}

void PlanSearch::decide() {
  result_.engine = engine_;
  result_.feasible = best_ < 1e300;
  result_.split_for_memory = splits_for_memory_;
  for (const auto& [degrees, rejected] : too_large_) {
    TRAINRT_REQUIRE(result_.feasible || !nearest_.layout.first_block.empty(),
                    kInvalidArgument,
                    "no plan that the pins allow can be carried out; with tp ",
                    degrees.first,
                    ", pp ",
                    degrees.second,
                    " the best one ",
                    rejected.rejected_because);
  }
  if (result_.feasible) {
    explain_too_large();
  } else if (request_.only_feasible) {
    return;
  }
  result_.chosen = result_.feasible ? chosen_ : nearest_;
  result_.drains_because = drains_because(result_.chosen.layout);
  take_written_shares(&result_.chosen);
  StepRequest again = step_request(result_.chosen);
  again.keep_timeline = result_.feasible;
  again.memory_error = {1, 1, 1};
  result_.chosen.prediction = predict_step(again);
  if (!result_.chosen.rank_memory.empty()) {
    result_.chosen.prediction.stages =
        stages_of_ranks(result_.chosen.rank_memory, request_.topology, result_.chosen.layout);
  }
  result_.value = value_of(result_.chosen, result_.chosen.prediction.seconds);
  result_.plan =
      plan_of(request_, result_.chosen, *profiles_[static_cast<size_t>(result_.chosen.profile)]);
  StepPrediction searched;  // as the alternatives are
  searched.seconds = result_.chosen.prediction.seconds;
  searched.breakdown = result_.chosen.prediction.breakdown;
  take_program_time(&result_.chosen);
  list_alternatives(searched);
  result_.profiles = profiles_;
}

}  // namespace trainrt
