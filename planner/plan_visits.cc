// What the search finds out about a single shape: whether a layout of it fits and how fast it is at
// least, by estimates; and what the programs of one that has won take.
#include <algorithm>

#include "graph/base/error.h"
#include "planner/parallel_for.h"
#include "planner/plan_search.h"
#include "planner/step_memory.h"

namespace trainrt {

namespace {

constexpr size_t kTogether = 32;  // shapes that are looked at ahead

}  // namespace

bool PlanSearch::fit(const Shape& shape, Candidate* candidate, Caches* caches) const {
  *candidate = candidate_of(shape);
  candidate->least_seconds = shape.bound_seconds;
  const StepRequest request = step_request(*candidate, caches);
  LayoutFit fit = layout_fit(request, candidate, caches);
  const bool fits = fit.start();
  candidate->prediction.stages = predict_memory(request);
  return fits;
}

// No cut of the shape fits, by the sums alone.
bool PlanSearch::proven_too_large(const Shape& shape, Caches* caches) const {
  const Candidate candidate = candidate_of(shape, /*place=*/!uniform_);
  const Layout& layout = candidate.layout;
  const StepRequest request = step_request(candidate, caches);
  const int total = num_micro_batches(layout.micro_batch);
  return StageMemories(request).proven_too_large((total + layout.data - 1) / layout.data);
}

bool PlanSearch::is_known(size_t shape) const {
  const auto found = visits_.find(shape);
  return found != visits_.end() &&
         (found->second.too_large ||
          found->second.memory_error == memory_error(found->second.candidate));
}

PlanSearch::Visit PlanSearch::visit(size_t shape, Caches* caches) const {
  Visit visited;
  visited.too_large = proven_too_large(shapes_[shape], caches);
  if (visited.too_large) {
    return visited;
  }
  visited.fits = fit(shapes_[shape], &visited.candidate, caches);
  visited.candidate.shape = shape;
  visited.memory_error = memory_error(visited.candidate);
  visited.redundant =
      visited.fits && shapes_[shape].as_needed && visited.candidate.layout.block_recompute.empty();
  if (visited.fits && !visited.redundant) {
    cut_shares(&visited.candidate);
    StepRequest request = step_request(visited.candidate, caches);
    request.bound_only = true;
    visited.candidate.prediction = predict_step(request);
  }
  return visited;
}

// What is to be known of `shape`, and of some behind it, which are looked at next. Nothing that one
// finds depends on another.
void PlanSearch::visit_from(size_t shape) {
  if (is_known(shape)) {
    return;
  }
  std::vector<size_t> open;
  for (size_t i = shape; i < std::min(shape + kTogether, shapes_.size()); ++i) {
    if (shapes_[i].bound < best_ && banned_.count(i) == 0 && !is_known(i)) {
      open.push_back(i);
    }
  }
  std::vector<Visit> found(open.size());
  parallel_for(open.size(),
               [&](size_t i, size_t worker) { found[i] = visit(open[i], &caches_[worker]); });
  for (size_t i = 0; i < open.size(); ++i) {
    visits_[open[i]] = std::move(found[i]);
  }
}

// Replays the candidate of `shape`, and as many behind it as there are idle cores for, if they are
// visited and may still win as things are.
void PlanSearch::replay_from(size_t shape) {
  std::vector<Visit*> open;
  for (auto at = visits_.find(shape);
       at != visits_.end() && at->first < shape + kTogether && open.size() < most_workers();
       ++at) {
    Visit& visited = at->second;
    if (at->first == shape ||
        (shapes_[at->first].bound < best_ && banned_.count(at->first) == 0 && is_known(at->first) &&
         visited.fits && !visited.redundant && !visited.replayed && !visited.replay &&
         may_win(visited.candidate))) {
      open.push_back(&visited);
    }
  }
  parallel_for(open.size(), [&](size_t i, size_t worker) {
    open[i]->replay = predict_step(step_request(open[i]->candidate, &caches_[worker]));
  });
}

PlanSearch::MemoryKind PlanSearch::memory_kind(const Candidate& candidate) {
  return {candidate.profile, candidate.rank_profiles, candidate.layout.zero_stage};
}

std::array<double, 3> PlanSearch::memory_error(const Candidate& candidate) const {
  const auto found = memory_errors_.find(memory_kind(candidate));
  if (found != memory_errors_.end()) {
    return found->second;
  }
  return {estimate_error_, estimate_error_, estimate_error_};
}

// Of all ranks, from their programs; nothing where compiling those would take too long. A report
// can wait for that of CPUs, whose programs are priced too, unless it is huge; for GPUs, where
// there is another way, if it takes some 0.1 s.
std::optional<std::vector<RankMemory>> PlanSearch::programs_memory(Candidate* candidate) {
  constexpr int64_t kMostWork = 16000, kQuickWork = 2000;
  const Layout& layout = candidate->layout;
  const GraphProfile& own = *profiles_[static_cast<size_t>(candidate->profile)];
  write_shares(candidate);
  const Plan plan = plan_of(request_, *candidate, own);
  const int64_t work = ProgramMemory::work(plan, own.num_nodes);
  const bool on_cpu = request_.device_spec(request_.topology, 0).backend == Backend::kCpu;
  const auto device = [&](int rank) {
    return request_.device_spec(request_.topology, layout.device(rank));
  };
  std::optional<std::vector<RankMemory>> found;
  if (request_.program_source.forward && work > (on_cpu ? kMostWork : kQuickWork)) {
    found = short_program_memory(request_.program_source, plan, device);
  }
  if (!found && work <= kMostWork) {
    std::vector<const CostModel*> costs;
    for (int rank = 0; rank < layout.world_size(); ++rank) {
      costs.push_back(cpu_cost(layout.device(rank)));
    }
    const auto cost = [&](int rank) { return costs[static_cast<size_t>(rank)]; };
    found = ProgramMemory(request_.programs, plan, device, cost).all();
  }
  return found;
}

bool PlanSearch::settle_memory(Candidate* candidate) {
  const Layout& layout = candidate->layout;
  constexpr double kFarFromLimit = 0.5;  // of the memory; no estimate is as wrong
  const bool is_tight = std::any_of(
      candidate->prediction.stages.begin(),
      candidate->prediction.stages.end(),
      [](const StageMemory& stage) {
        return static_cast<double>(stage.peak_bytes) >
               kFarFromLimit * static_cast<double>(stage.capacity_bytes - stage.reserved_bytes);
      });
  if (!request_.programs || (request_.memory_where_tight && !is_tight)) {
    return true;
  }
  const std::vector<StageMemory> estimate = candidate->prediction.stages;
  const std::array<double, 3> believed = memory_error(*candidate);
  try {
    std::optional<std::vector<RankMemory>> found = programs_memory(candidate);
    if (!found && *std::min_element(believed.begin(), believed.end()) < 1) {
      banned_.insert(candidate->shape);  // it fits by less than the estimate alone
      return false;
    }
    if (!found) {
      return true;
    }
    candidate->rank_memory = std::move(*found);
  } catch (Error& error) {
    Candidate& rejected = too_large_[{layout.tensor, layout.pipeline}];
    rejected = *candidate;
    rejected.rejected_because = concat("cannot be carried out: ", error.what());
    banned_.insert(candidate->shape);
    return false;
  }
  candidate->prediction.stages = stages_of_ranks(candidate->rank_memory, request_.topology, layout);
  if (candidate->prediction.fits()) {
    return true;
  }
  keep_nearest(*candidate);
  // Of the stage that lacks most: so this candidate, at least, is refused from now on.
  size_t worst = 0;
  for (size_t i = 1; i < estimate.size(); ++i) {
    const std::vector<StageMemory>& stages = candidate->prediction.stages;
    worst = stages[i].missing_bytes() > stages[worst].missing_bytes() ? i : worst;
  }
  const double error = static_cast<double>(candidate->prediction.stages[worst].peak_bytes) /
                       static_cast<double>(estimate[worst].peak_bytes);
  // In steps that end: plans of one kind differ little, and each one's programs take their time.
  constexpr double kLeastStep = 1.002;
  std::array<double, 3> errors = believed;
  double& known = errors[static_cast<size_t>(strongest_recompute(layout, static_cast<int>(worst)))];
  if (error <= known) {
    banned_.insert(candidate->shape);
  } else {
    known = std::max(error, kLeastStep * known);
    memory_errors_[memory_kind(*candidate)] = errors;
  }
  return false;
}

}  // namespace trainrt
