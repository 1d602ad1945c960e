// Where a rank has one stage, cuts come from planner/stage_partition, exactly balanced within the
// memory of each. Where it has several, balanced cuts are repaired until the fullest rank fits.
// Both minimise the longest stage and not the step, which fills and drains the pipeline too: hence
// the local search, in which only the replay decides. Shares are exact for given cuts
// (planner/layout_shares). But cuts suit the devices that have work, and shares the cuts: hence the
// search begins anew from shares that leave some kinds of data ranks idle, or, where they are few,
// from all.
#include "planner/layout_fit.h"

#include <algorithm>
#include <limits>

#include "planner/stage_partition.h"

namespace trainrt {

namespace {

constexpr double kFaster = 1 - 1e-12;

// Repair is tried where a rank lacks at most this part of its memory, or what two blocks of it
// take.
constexpr double kRepairable = 0.2;

// Where there are at most so many ways to cut, all are tried before a shape is given up.
constexpr int64_t kFewCuts = 200;
// Cuts that the local search looks at, whether they fit or not.
constexpr int kMostLooks = 20000;

}  // namespace

LayoutFit::LayoutFit(const StepRequest& request,
                     const StepMicroBatches& micro_batches,
                     const std::vector<int>& counts,
                     CutCache* balanced,
                     Layout* layout)
    : request_(request),
      timed_(request),
      units_(micro_batches.total / micro_batches.together),
      together_(micro_batches.together),
      fixed_(!counts.empty()),
      balanced_(balanced),
      layout_(layout),
      memories_(request) {
  timed_.time_only = true;
  if (fixed_) {
    layout_->num_micro_batches = counts;
  }
  for (int data_rank = 0; data_rank < (request.uniform ? 1 : layout->data); ++data_rank) {
    Kind kind;
    kind.micro_batch = layout->micro_batch_size(data_rank);
    for (int stage = 0; stage < layout->pipeline; ++stage) {
      kind.types.push_back(slowest_type(stage, data_rank));
    }
    profiles_[kind.micro_batch] = &request.profile_of(data_rank);
    kinds_.push_back(std::move(kind));
  }
}

void LayoutFit::pin_cuts(std::vector<int> first_block) {
  pinned_cuts_ = std::move(first_block);
}

int LayoutFit::slowest_type(int stage, int data_rank) const {
  const Topology& topology = *request_.topology;
  int slowest = -1;
  for (int i = 0; i < (request_.uniform ? 1 : layout_->tensor); ++i) {
    const int rank = (stage * layout_->data + data_rank) * layout_->tensor + i;
    const int type = topology.device(layout_->device(rank)).type;
    const auto rate = [&](int t) {
      return topology.types[static_cast<size_t>(t)].peak_flops(request_.precision);
    };
    slowest = slowest < 0 || rate(type) < rate(slowest) ? type : slowest;
  }
  return slowest;
}

const std::vector<double>& LayoutFit::block_seconds(const Kind& kind,
                                                    int stage,
                                                    RecomputeMode mode) {
  const int device_type = kind.types[static_cast<size_t>(stage)];
  std::vector<double>& seconds = block_seconds_[{kind.micro_batch, device_type, mode}];
  if (seconds.empty()) {
    const ModelProfile& profile = *profiles_.at(kind.micro_batch);
    const std::vector<StageTimes> classes = class_seconds(request_, profile, device_type, mode);
    for (const int block : profile.blocks) {
      const StageTimes& own = classes[static_cast<size_t>(block)];
      seconds.push_back(own.forward + own.backward);
    }
  }
  return seconds;
}

// Of the fullest rank, with what runs again chosen anew where that is open.
int64_t LayoutFit::shortage() {
  settle_recompute();
  int64_t most = std::numeric_limits<int64_t>::min();
  for (int stage = 0; stage < layout_->pipeline; ++stage) {
    most = std::max(most, memories_.of(stage).missing_bytes());
  }
  return most;
}

bool LayoutFit::start() {
  layout_->first_block.assign(
      static_cast<size_t>(layout_->pipeline) * static_cast<size_t>(layout_->virtual_stages), 0);
  share();
  const bool fits = cut();
  share();
  if (fits && shortage() <= 0) {
    return true;
  }
  if (fixed_ || request_.uniform) {
    return false;
  }
  // An even spread has the fewest micro-batches in flight.
  layout_->num_micro_batches = spread(std::vector<double>(kinds_.size(), 1), {});
  return cut() && shortage() <= 0;
}

bool LayoutFit::cut() {
  Layout& layout = *layout_;
  const auto stages = layout.first_block.size();
  if (!pinned_cuts_.empty()) {
    layout.first_block = pinned_cuts_;
    return true;
  }
  if (stages == 1) {
    return true;
  }
  std::vector<std::vector<double>> seconds;
  for (size_t s = 0; s < stages; ++s) {
    // The slowest type among the stage's data ranks sets its pace, or where these have sizes of
    // their own the one with the most to do.
    const std::vector<double>* slowest = nullptr;
    double most = -1;
    for (size_t data_rank = 0; data_rank < kinds_.size(); ++data_rank) {
      if (layout.micro_batches(static_cast<int>(data_rank)) == 0) {
        continue;
      }
      const std::vector<double>& own =
          block_seconds(kinds_[data_rank], static_cast<int>(s) % layout.pipeline);
      double sum = 0;
      for (const double block : own) {
        sum += block;
      }
      if (!layout.micro_batch_sizes.empty()) {
        sum *= layout.micro_batches(static_cast<int>(data_rank));
      }
      if (sum > most) {
        most = sum;
        slowest = &own;
      }
    }
    seconds.push_back(*slowest);
  }
  const std::vector<int> cuts = cuts_that_balance(seconds);
  if (!layout.recompute_as_needed) {
    return cut_within_memory(seconds, cuts);
  }
  layout.block_recompute.clear();
  layout.first_block = cuts;
  if (shortage() <= 0 || cut_with_recompute(seconds)) {
    return true;
  }
  layout.first_block = cuts;
  settle_recompute();
  return false;
}

std::vector<int> LayoutFit::cuts_that_balance(const std::vector<std::vector<double>>& seconds) {
  if (!request_.uniform) {
    return balanced_cuts(seconds);
  }
  std::vector<int>& cuts = (*balanced_)[{request_.profile, layout_->recompute, seconds.size()}];
  cuts = cuts.empty() ? balanced_cuts(seconds) : cuts;
  return cuts;
}

// The same such that every stage fits, where a rank has one; empty when there are none.
std::vector<int> LayoutFit::cuts_that_fit(const std::vector<std::vector<double>>& seconds) {
  return balanced_cuts(seconds, [&](int stage, int first, int end) {
    const auto s = static_cast<size_t>(stage);
    layout_->first_block[s] = first;
    if (s + 1 < seconds.size()) {
      layout_->first_block[s + 1] = end;
    }
    return memories_.of(stage).fits();
  });
}

// From cuts that balance; these are left where none fit.
bool LayoutFit::cut_within_memory(const std::vector<std::vector<double>>& seconds,
                                  const std::vector<int>& balanced) {
  Layout& layout = *layout_;
  if (layout.virtual_stages == 1) {
    const std::vector<int> cuts = cuts_that_fit(seconds);
    layout.first_block = cuts.empty() ? balanced : cuts;
    return !cuts.empty();
  }
  layout.first_block = balanced;
  if (repair()) {
    return true;
  }
  const std::vector<int> short_of_memory = layout.first_block;
  if (for_all_cuts(request_.profile->num_blocks(),
                   kFewCuts,
                   &layout.first_block,
                   [&] { return shortage() <= 0; }) &&
      shortage() <= 0) {
    return true;
  }
  layout.first_block = short_of_memory;
  return false;
}

// Takes blocks from the fullest rank, one border at a time. A border touches the memory of two
// ranks alone.
bool LayoutFit::repair() {
  Layout& layout = *layout_;
  std::vector<int64_t> missing(static_cast<size_t>(layout.pipeline));  // by rank, now
  const auto last = static_cast<int>(layout.first_block.size()) - 1;
  for (int round = 0; round < 64; ++round) {
    for (int rank = 0; rank < layout.pipeline; ++rank) {
      missing[static_cast<size_t>(rank)] = memories_.of(rank).missing_bytes();
    }
    const auto fullest = std::max_element(missing.begin(), missing.end());
    const auto worst = static_cast<int>(fullest - missing.begin());
    if (*fullest <= 0) {
      return true;
    }
    const double part = std::max(
        kRepairable, 2.0 * layout.pipeline / static_cast<double>(request_.profile->num_blocks()));
    if (static_cast<double>(*fullest) >
        part * static_cast<double>(memories_.of(worst).capacity_bytes)) {
      return false;
    }
    std::vector<int> best;
    int64_t least = *fullest;
    const std::vector<int> present = layout.first_block;
    for (int s = worst; s <= last; s += layout.pipeline) {
      for (const int border : {s, s + 1}) {
        if (border < 1 || border > last) {
          continue;
        }
        const int before = (border - 1) % layout.pipeline, after = border % layout.pipeline;
        int64_t others = std::numeric_limits<int64_t>::min();
        for (int rank = 0; rank < layout.pipeline; ++rank) {
          if (rank != before && rank != after) {
            others = std::max(others, missing[static_cast<size_t>(rank)]);
          }
        }
        const auto at = static_cast<size_t>(border);
        const int end = border < last ? present[at + 1] : request_.profile->num_blocks();
        for (int place = present[at - 1] + 1; place < end && others < least; ++place) {
          layout.first_block[at] = place;
          const int64_t now = std::max(
              {others, memories_.of(before).missing_bytes(), memories_.of(after).missing_bytes()});
          if (now < least) {
            least = now;
            best = layout.first_block;
          }
        }
        layout.first_block = present;
      }
    }
    if (best.empty()) {
      return false;
    }
    layout.first_block = best;
  }
  return false;
}

bool LayoutFit::spent(int budget) const {
  return num_replays_ >= budget || num_looks_ >= kMostLooks;
}

// Of the present layout; where it takes `give_up` or more, perhaps no more than a bound.
double LayoutFit::seconds(double give_up) {
  ++num_replays_;
  timed_.give_up = give_up;
  return predict_step(timed_).seconds;
}

// The same, remembered; 1e300 for cuts that do not fit.
double LayoutFit::cut_seconds(double give_up) {
  ++num_looks_;
  tried_key_ = layout_->first_block;
  tried_key_.insert(
      tried_key_.end(), layout_->num_micro_batches.begin(), layout_->num_micro_batches.end());
  const auto [found, is_new] = tried_.try_emplace(tried_key_);
  Tried& tried = found->second;
  if (is_new && shortage() > 0) {
    tried.seconds = 1e300;
  } else if (is_new || (tried.bound && tried.seconds < give_up)) {
    settle_recompute();
    tried.seconds = seconds(give_up);
    tried.bound = tried.seconds >= give_up;
  } else if (tried.seconds < 1e300) {
    ++num_replays_;  // the budget bounds what is looked at, new or not
  }
  return tried.seconds;
}

bool LayoutFit::try_cuts(const std::vector<std::pair<int, int>>& moves, double* best) {
  std::vector<int>& first = layout_->first_block;
  for (const auto& [border, step] : moves) {
    first[static_cast<size_t>(border)] += step;
  }
  bool valid = true;
  for (size_t s = 1; s < first.size(); ++s) {
    valid = valid && first[s - 1] < first[s];
  }
  if (valid && first.back() < request_.profile->num_blocks()) {
    const double now = cut_seconds(kFaster * *best);
    if (now < kFaster * *best) {
      *best = now;
      return true;
    }
  }
  for (const auto& [border, step] : moves) {
    first[static_cast<size_t>(border)] -= step;
  }
  return false;
}

// Moves each border in turn to where between its neighbours the step is shortest.
bool LayoutFit::slide_borders(int budget, double* best) {
  bool gained = false;
  const auto stages = static_cast<int>(layout_->first_block.size());
  for (int border = 1; border < stages; ++border) {
    const std::vector<int>& first = layout_->first_block;
    const auto at = static_cast<size_t>(border);
    const int low = first[at - 1] + 1;
    const int high = border + 1 < stages ? first[at + 1] : request_.profile->num_blocks();
    for (int place = low; place < high && !spent(budget); ++place) {
      if (place != first[at]) {
        gained = try_cuts({{border, place - first[at]}}, best) || gained;
      }
    }
  }
  return gained;
}

// Adds to `moves` all ways to move `more` borders by one block each, and tries them.
bool LayoutFit::move_borders(int more,
                             int budget,
                             std::vector<std::pair<int, int>>* moves,
                             double* best) {
  if (more == 0) {
    return try_cuts(*moves, best);
  }
  bool gained = false;
  const auto stages = static_cast<int>(layout_->first_block.size());
  for (int border = moves->empty() ? 1 : moves->back().first + 1; border < stages; ++border) {
    for (const int step : {-1, 1}) {
      if (spent(budget)) {
        return gained;
      }
      moves->emplace_back(border, step);
      gained = move_borders(more - 1, budget, moves, best) || gained;
      moves->pop_back();
    }
  }
  return gained;
}

// From the present cuts: single borders to any place, then pairs and triples of them by one block.
bool LayoutFit::descend(int budget, double* best) {
  constexpr int kMostTogether = 3;
  bool changed = false;
  for (int together = 1; together <= kMostTogether && !spent(budget);) {
    std::vector<std::pair<int, int>> moves;
    if (together == 1 ? slide_borders(budget, best)
                      : move_borders(together, budget, &moves, best)) {
      changed = true;
      together = 1;
    } else {
      ++together;
    }
  }
  return changed;
}

// From the present cuts, then from those that give all they can to the last stage, and to the
// first.
bool LayoutFit::improve_cuts(int budget) {
  if (!pinned_cuts_.empty()) {
    return false;
  }
  std::vector<int>& first = layout_->first_block;
  if (first.size() == 1) {
    return false;
  }
  double best = seconds();
  const std::vector<int> begin = first;
  std::vector<int> chosen = begin;
  const bool all = for_all_cuts(request_.profile->num_blocks(), budget, &first, [&] {
    const double now = cut_seconds(kFaster * best);
    if (now < kFaster * best) {
      best = now;
      chosen = first;
    }
    return false;
  });
  if (all) {
    first = chosen;
    return chosen != begin;
  }
  bool changed = descend(budget, &best);
  const int spare = request_.profile->num_blocks() - static_cast<int>(first.size());
  for (const int shift : {0, spare}) {
    const std::vector<int> present = first;
    for (size_t s = 1; s < first.size(); ++s) {
      first[s] = static_cast<int>(s) + shift;
    }
    double other = !spent(budget) && shortage() <= 0 ? seconds() : 1e300;
    if (other < 1e300) {
      descend(budget, &other);
    }
    if (other < kFaster * best) {
      best = other;
      changed = true;
    } else {
      first = present;
    }
  }
  return changed;
}

void LayoutFit::climb(int budget) {
  for (bool again = true; again && !spent(budget);) {
    again = improve_shares();
    again = improve_cuts(budget) || again;
    settle_recompute();  // of cuts that were looked at on the way, the best are back
  }
}

int LayoutFit::improve(int budget) {
  num_replays_ = num_looks_ = 0;
  climb(budget);
  std::vector<std::vector<int>> starts = other_shares();
  if (starts.empty()) {
    return num_replays_;
  }
  Layout best = *layout_;
  double least = seconds();
  for (const std::vector<int>& counts : starts) {
    if (spent(budget) || counts == best.num_micro_batches || least_seconds(counts) >= least) {
      continue;
    }
    layout_->num_micro_batches = counts;
    if (!cut() || shortage() > 0) {
      continue;
    }
    climb(budget);
    const double now = seconds(kFaster * least);
    if (now < kFaster * least) {
      least = now;
      best = *layout_;
    }
  }
  *layout_ = best;
  return num_replays_;
}

}  // namespace trainrt
