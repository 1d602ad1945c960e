// Why not otherwise: the rest of PlanSearch once the plan is chosen. One alternative for each
// tensor and pipeline degree, with what it lost by, or by how much it does not fit.
#include <algorithm>
#include <sstream>

#include "planner/plan_search.h"

namespace trainrt {

namespace {

constexpr size_t kMostAlternatives = 8;
// Points beyond the decision that are fitted to have something to say of their kind.
constexpr int kMostFitsForAlternatives = 64;

}  // namespace

// What is too large by sums has no cuts yet, from which to tell what is missing where. With a plan
// at hand the slowest few of each kind, which save the most memory, are enough to tell.
void PlanSearch::explain_too_large() {
  constexpr int kOfEachKind = 8;
  std::map<Group, int> told;
  for (size_t i = too_large_shapes_.size(); i-- > 0;) {
    const Shape& shape = shapes_[too_large_shapes_[i]];
    const Degrees& d = degrees_[static_cast<size_t>(shape.degrees)];
    const Group group = {d.tensor, d.pipeline};
    if (result_.feasible && (best_of_group_.count(group) != 0 || ++told[group] > kOfEachKind)) {
      continue;
    }
    Candidate candidate;
    fit(shape, &candidate, &model_->caches[0]);
    keep_nearest(candidate);
  }
}

// One alternative per (tensor, pipeline), the best of each, with why it lost; then those for which
// no plan fits. `searched`: the chosen plan's time as the search alone puts it.
void PlanSearch::list_alternatives(const StepPrediction& searched) {
  const auto group_of = [](const Layout& layout) { return Group(layout.tensor, layout.pipeline); };
  int fits = 0;
  for (const Shape& shape : shapes_) {
    const Degrees& d = degrees_[static_cast<size_t>(shape.degrees)];
    const Group group = {d.tensor, d.pipeline};
    Candidate candidate;
    if (!result_.feasible || best_of_group_.count(group) != 0 ||
        best_of_group_.size() > kMostAlternatives || fits >= kMostFitsForAlternatives ||
        proven_too_large(shape, &model_->caches[0])) {
      continue;
    }
    ++fits;
    if (fit(shape, &candidate, &model_->caches[0])) {
      candidate.prediction.bound_only = true;
      best_of_group_[group] = std::move(candidate);
    } else {
      keep_nearest(candidate);
    }
  }
  const Group chosen = group_of(result_.chosen.layout);
  std::vector<Candidate> others;
  for (auto& [group, other] : best_of_group_) {
    if (group != chosen) {
      if (other.prediction.bound_only) {
        other.prediction = predict_step(step_request(other));
      }
      others.push_back(std::move(other));
    }
  }
  std::stable_sort(others.begin(), others.end(), [](const Candidate& a, const Candidate& b) {
    return a.prediction.seconds < b.prediction.seconds;
  });
  for (Candidate& other : others) {
    if (result_.alternatives.size() < kMostAlternatives) {
      other.rejected_because = why_slower(other.prediction, searched);
      other.prediction.seconds *= result_.programs_factor;
      write_shares(&other);
      result_.alternatives.push_back(std::move(other));
    }
  }
  for (auto& [group, other] : too_large_) {
    if (group != chosen && best_of_group_.count(group) == 0 &&
        result_.alternatives.size() < 2 * kMostAlternatives) {
      other.prediction = predict_step(step_request(other));
      other.prediction.seconds *= result_.programs_factor;
      write_shares(&other);
      result_.alternatives.push_back(std::move(other));
    }
  }
}

std::string why_slower(const StepPrediction& other, const StepPrediction& chosen) {
  const StepBreakdown &a = chosen.breakdown, &b = other.breakdown;
  const std::pair<const char*, double> parts[] = {
      {"compute", b.compute - a.compute},
      {"tensor-parallel communication", b.tensor_communication - a.tensor_communication},
      {"stage transfers", b.transfer - a.transfer},
      {"pipeline bubble", b.bubble - a.bubble},
      {"exposed gradient reduction", b.gradients - a.gradients},
      {"weight gathers", b.gather - a.gather},
      {"optimizer", b.optimizer - a.optimizer}};
  const auto worst =
      std::max_element(std::begin(parts), std::end(parts), [](const auto& x, const auto& y) {
        return x.second < y.second;
      });
  const double slower = other.seconds / chosen.seconds - 1;
  if (slower <= 0) {
    return "no better by the objective asked for";
  }
  std::ostringstream text;
  text.precision(3);
  text << "slower by " << 100 * slower << " %: " << worst->first << " takes " << 1e3 * worst->second
       << " ms more";
  return text.str();
}

}  // namespace trainrt
