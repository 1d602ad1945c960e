// Why not otherwise: the rest of PlanSearch once the plan is chosen. One alternative for each
// tensor and pipeline degree, with what it lost by, or by how much it does not fit.
#include <algorithm>
#include <sstream>

#include "planner/parallel_for.h"
#include "planner/plan_search.h"
#include "planner/report_parts.h"

namespace trainrt {

namespace {

constexpr size_t kMostAlternatives = 8;
// Points beyond the decision that are fitted to have something to say of their kind.
constexpr int kMostFitsForAlternatives = 64;

}  // namespace

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
        proven_too_large(shape, &caches_[0])) {
      continue;
    }
    ++fits;
    if (fit(shape, &candidate, &caches_[0])) {
      candidate.shape = static_cast<size_t>(&shape - shapes_.data());
      candidate.prediction.bound_only = true;
      cut_shares(&candidate);
      best_of_group_[group] = std::move(candidate);
    } else {
      keep_nearest(candidate);
    }
  }
  const Group chosen = group_of(result_.chosen.layout);
  std::vector<Candidate> others;
  for (auto& [group, other] : best_of_group_) {
    if (group != chosen) {
      others.push_back(std::move(other));
    }
  }
  parallel_for(others.size(), [&](size_t i, size_t worker) {
    if (others[i].prediction.bound_only) {
      others[i].prediction = predict_step(step_request(others[i], &caches_[worker]));
    }
  });
  std::stable_sort(others.begin(), others.end(), [](const Candidate& a, const Candidate& b) {
    return a.prediction.seconds < b.prediction.seconds;
  });
  for (Candidate& other : others) {
    if (result_.alternatives.size() < kMostAlternatives) {
      const auto timed = program_seconds_.find(other.shape);
      const double by_programs = timed == program_seconds_.end() ? 0 : timed->second;
      const double chosen_seconds = result_.chosen.prediction.seconds;
      if (by_programs > chosen_seconds && other.prediction.seconds <= searched.seconds) {
        other.rejected_because = concat("slower by ",
                                        number_text(100 * (by_programs / chosen_seconds - 1)),
                                        " % when its programs are replayed");
      } else {
        other.rejected_because = why_slower(other.prediction, searched);
      }
      other.prediction.seconds =
          by_programs > 0 ? by_programs : other.prediction.seconds * result_.programs_factor;
      write_shares(&other);
      result_.alternatives.push_back(std::move(other));
    }
  }
  std::vector<Candidate*> too_large;
  for (auto& [group, other] : too_large_) {
    if (group != chosen && best_of_group_.count(group) == 0 &&
        result_.alternatives.size() + too_large.size() < 2 * kMostAlternatives) {
      too_large.push_back(&other);
    }
  }
  parallel_for(too_large.size(), [&](size_t i, size_t worker) {
    Candidate& other = *too_large[i];
    other.prediction = predict_step(step_request(other, &caches_[worker]));
    other.prediction.seconds *= result_.programs_factor;
    write_shares(&other);
  });
  for (Candidate* other : too_large) {
    result_.alternatives.push_back(std::move(*other));
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
