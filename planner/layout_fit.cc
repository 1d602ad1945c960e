// Where a rank has one stage, cuts come from planner/stage_partition, exactly balanced within the
// memory of each. Where it has several, balanced cuts are repaired until the fullest rank fits.
// Both minimise the longest stage and not the step, which fills and drains the pipeline too: hence
// the local search, in which only the replay decides. Shares are exact for given cuts: what a data
// rank takes never falls with its micro-batches, so when the slowest rank can give one to no other,
// no spread is faster. But cuts suit the devices that have work, and shares the cuts: hence the
// search begins anew from shares that leave some kinds of data ranks idle, or, where they are few,
// from all.
#include "planner/layout_fit.h"

#include <algorithm>
#include <limits>

#include "planner/shares.h"
#include "planner/stage_partition.h"
#include "planner/step_memory.h"

namespace trainrt {

namespace {

constexpr double kFaster = 1 - 1e-12;

// Repair is tried where a rank lacks at most this part of its memory, or what two blocks of it
// take.
constexpr double kRepairable = 0.2;

// Where there are at most so many ways to cut, all are tried before a shape is given up.
constexpr int64_t kFewCuts = 200;
// Where there are at most so many ways to share, the search begins from each.
constexpr int64_t kFewShares = 64;
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
      layout_(layout) {
  timed_.time_only = true;
  if (fixed_) {
    layout_->num_micro_batches = counts;
  }
  for (int data_rank = 0; data_rank < (request.uniform ? 1 : layout->data); ++data_rank) {
    std::vector<int> types;
    for (int stage = 0; stage < layout->pipeline; ++stage) {
      types.push_back(slowest_type(stage, data_rank));
    }
    kinds_.push_back(std::move(types));
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

const std::vector<double>& LayoutFit::block_seconds(int device_type) {
  std::vector<double>& seconds = block_seconds_[device_type];
  if (seconds.empty()) {
    const std::vector<StageTimes> classes = class_seconds(request_, device_type);
    for (const int block : request_.profile->blocks) {
      const StageTimes& own = classes[static_cast<size_t>(block)];
      seconds.push_back(own.forward + own.backward);
    }
  }
  return seconds;
}

int64_t LayoutFit::shortage() const {
  const StageMemories memories(request_);
  int64_t most = std::numeric_limits<int64_t>::min();
  for (int stage = 0; stage < layout_->pipeline; ++stage) {
    const StageMemory memory = memories.of(stage);
    most = std::max(most, memory.peak_bytes + memory.reserved_bytes - memory.capacity_bytes);
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

// Micro-batches of each data rank by its pace; `caps`: most units of each.
std::vector<int> LayoutFit::spread(const std::vector<double>& pace,
                                   const std::vector<int>& caps) const {
  std::vector<int> counts = spread_micro_batches(units_, pace, caps);
  for (int& count : counts) {
    count *= together_;
  }
  return counts;
}

// Seconds per micro-batch of a data rank with stages of these types, were all of them equally long.
double LayoutFit::perfect_pace(const std::vector<int>& types) {
  double speed = 0;
  for (const int type : types) {
    double whole = 0;
    for (const double own : block_seconds(type)) {
      whole += own;
    }
    speed += 1 / whole;
  }
  return 1 / speed;
}

// By pace: of the longest stage, once the stages are cut, else of perfect ones.
void LayoutFit::share() {
  if (fixed_) {
    return;
  }
  if (request_.uniform) {
    layout_->num_micro_batches = {(units_ + layout_->data - 1) / layout_->data * together_};
    return;
  }
  const std::vector<int>& first = layout_->first_block;
  const bool cut = first.size() == 1 || first.back() > 0;
  std::vector<double> pace;
  for (const std::vector<int>& types : kinds_) {
    std::vector<double> stages(types.size(), 0);
    for (size_t s = 0; s < first.size(); ++s) {
      const std::vector<double>& seconds = block_seconds(types[s % types.size()]);
      const size_t end = s + 1 < first.size() ? static_cast<size_t>(first[s + 1]) : seconds.size();
      for (auto b = static_cast<size_t>(first[s]); cut && b < end; ++b) {
        stages[s % types.size()] += seconds[b];
      }
    }
    pace.push_back(cut ? *std::max_element(stages.begin(), stages.end()) : perfect_pace(types));
  }
  layout_->num_micro_batches = spread(pace, {});
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
    // The slowest type among the stage's data ranks sets its pace.
    const std::vector<double>* slowest = nullptr;
    double most = -1;
    for (size_t data_rank = 0; data_rank < kinds_.size(); ++data_rank) {
      if (layout.micro_batches(static_cast<int>(data_rank)) == 0) {
        continue;
      }
      const std::vector<double>& own =
          block_seconds(kinds_[data_rank][s % static_cast<size_t>(layout.pipeline)]);
      double sum = 0;
      for (const double block : own) {
        sum += block;
      }
      if (sum > most) {
        most = sum;
        slowest = &own;
      }
    }
    seconds.push_back(*slowest);
  }
  if (layout.virtual_stages == 1) {
    const StageMemories memories(request_);
    const std::vector<int> cuts = balanced_cuts(seconds, [&](int stage, int first, int end) {
      const auto s = static_cast<size_t>(stage);
      layout.first_block[s] = first;
      if (s + 1 < stages) {
        layout.first_block[s + 1] = end;
      }
      return memories.of(stage).fits();
    });
    layout.first_block = cuts.empty() ? balanced_cuts(seconds) : cuts;
    return !cuts.empty();
  }
  if (request_.uniform) {
    std::vector<int>& cuts = (*balanced_)[{request_.profile, layout.recompute, stages}];
    cuts = cuts.empty() ? balanced_cuts(seconds) : cuts;
    layout.first_block = cuts;
  } else {
    layout.first_block = balanced_cuts(seconds);
  }
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

// Takes blocks from the fullest rank, one border at a time.
bool LayoutFit::repair() {
  Layout& layout = *layout_;
  const StageMemories memories(request_);
  const auto missing = [&](int stage) {
    const StageMemory memory = memories.of(stage);
    return memory.peak_bytes + memory.reserved_bytes - memory.capacity_bytes;
  };
  const auto fullest = [&] {
    int worst = 0;
    for (int stage = 1; stage < layout.pipeline; ++stage) {
      worst = missing(stage) > missing(worst) ? stage : worst;
    }
    return worst;
  };
  const auto last = static_cast<int>(layout.first_block.size()) - 1;
  for (int round = 0; round < 64; ++round) {
    const int worst = fullest();
    const int64_t most = missing(worst);
    if (most <= 0) {
      return true;
    }
    const double part = std::max(
        kRepairable, 2.0 * layout.pipeline / static_cast<double>(request_.profile->num_blocks()));
    if (static_cast<double>(most) > part * static_cast<double>(memories.of(worst).capacity_bytes)) {
      return false;
    }
    std::vector<int> best;
    int64_t least = most;
    const std::vector<int> present = layout.first_block;
    for (int s = worst; s <= last; s += layout.pipeline) {
      for (const int border : {s, s + 1}) {
        if (border < 1 || border > last) {
          continue;
        }
        const auto at = static_cast<size_t>(border);
        const int end = border < last ? present[at + 1] : request_.profile->num_blocks();
        for (int place = present[at - 1] + 1; place < end; ++place) {
          layout.first_block[at] = place;
          const int64_t now = missing(fullest());
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
  const auto [found, is_new] =
      tried_.try_emplace({layout_->first_block, layout_->num_micro_batches});
  Tried& tried = found->second;
  if (is_new && shortage() > 0) {
    tried.seconds = 1e300;
  } else if (is_new || (tried.bound && tried.seconds < give_up)) {
    tried.seconds = seconds(give_up);
    tried.bound = tried.seconds >= give_up;
  } else if (tried.seconds < 1e300) {
    ++num_replays_;  // the budget bounds what is looked at, new or not
  }
  return tried.seconds;
}

double LayoutFit::rank_seconds(int data_rank, int micro_batches) {
  if (micro_batches == 0) {
    return 0;
  }
  const auto key = std::make_pair(kinds_[static_cast<size_t>(data_rank)], micro_batches);
  const auto found = known_.find(key);
  if (found != known_.end()) {
    return found->second;
  }
  int& count = layout_->num_micro_batches[static_cast<size_t>(data_rank)];
  const int present = count;
  count = micro_batches;
  const double own = pipeline_seconds(request_, data_rank);
  count = present;
  ++num_replays_;
  return known_.emplace(key, own).first->second;
}

bool LayoutFit::improve_shares() {
  if (fixed_ || request_.uniform || layout_->data == 1) {
    return false;
  }
  known_.clear();
  bool changed = false;
  std::vector<int>& counts = layout_->num_micro_batches;
  while (true) {
    const auto n = static_cast<int>(counts.size());
    const auto count = [&](int r) { return counts[static_cast<size_t>(r)]; };
    int slowest = 0, taker = -1;
    for (int r = 1; r < n; ++r) {
      if (rank_seconds(r, count(r)) > rank_seconds(slowest, count(slowest))) {
        slowest = r;
      }
    }
    for (int r = 0; r < n; ++r) {
      if (r != slowest && (taker < 0 || rank_seconds(r, count(r) + together_) <
                                            rank_seconds(taker, count(taker) + together_))) {
        taker = r;
      }
    }
    if (rank_seconds(taker, count(taker) + together_) >=
        kFaster * rank_seconds(slowest, count(slowest))) {
      return changed;
    }
    counts[static_cast<size_t>(slowest)] -= together_;
    counts[static_cast<size_t>(taker)] += together_;
    if (shortage() > 0) {
      counts[static_cast<size_t>(slowest)] += together_;
      counts[static_cast<size_t>(taker)] -= together_;
      return changed;
    }
    changed = true;
  }
}

bool LayoutFit::try_cuts(const std::vector<std::pair<int, int>>& moves, double* best) {
  std::vector<int>& first = layout_->first_block;
  const std::vector<int> present = first;
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
  first = present;
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

// Shares to begin from beside the present ones, those with the least work for the busiest first.
std::vector<std::vector<int>> LayoutFit::other_shares() {
  std::vector<std::vector<int>> starts;
  if (fixed_ || request_.uniform || layout_->data == 1) {
    return starts;
  }
  const size_t n = kinds_.size();
  int64_t ways = 1;
  for (size_t r = 1; r < n && ways <= kFewShares; ++r) {
    ways = ways * (units_ + static_cast<int64_t>(r)) / static_cast<int64_t>(r);
  }
  if (ways <= kFewShares) {
    std::vector<int> counts(n, 0);
    const std::function<void(size_t, int)> extend = [&](size_t r, int left) {
      if (r + 1 == n) {
        counts[r] = left * together_;
        starts.push_back(counts);
        return;
      }
      for (int own = 0; own <= left; ++own) {
        counts[r] = own * together_;
        extend(r + 1, left - own);
      }
    };
    extend(0, units_);
    return starts;
  }
  // Each set of kinds that some data rank is not of.
  std::vector<std::vector<int>> kinds = kinds_;
  std::sort(kinds.begin(), kinds.end());
  kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
  constexpr size_t kMostKinds = 4;
  for (size_t set = 1; kinds.size() <= kMostKinds && set + 1 < size_t{1} << kinds.size(); ++set) {
    std::vector<double> pace;
    std::vector<int> caps;
    for (const std::vector<int>& kind : kinds_) {
      const auto at = std::find(kinds.begin(), kinds.end(), kind) - kinds.begin();
      pace.push_back(perfect_pace(kind));
      caps.push_back((set >> at & 1) != 0 ? units_ : 0);
    }
    starts.push_back(spread(pace, caps));
  }
  return starts;
}

// No cuts let the step with these shares take less.
double LayoutFit::least_seconds(const std::vector<int>& counts) {
  double least = 0;
  for (size_t r = 0; r < counts.size(); ++r) {
    least = std::max(least, counts[r] * perfect_pace(kinds_[r]));
  }
  return least;
}

void LayoutFit::climb(int budget) {
  for (bool again = true; again && !spent(budget);) {
    again = improve_shares();
    again = improve_cuts(budget) || again;
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
