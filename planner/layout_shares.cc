// How LayoutFit shares the batch out. Shares are exact for given cuts: what a data rank takes never
// falls with its micro-batches, so when what the slowest rank gives up makes some other as slow, no
// spread is faster.
#include <algorithm>
#include <functional>

#include "planner/layout_fit.h"
#include "planner/shares.h"

namespace trainrt {

namespace {

constexpr double kFaster = 1 - 1e-12;

// Where there are at most so many ways to share, the search begins from each.
constexpr int64_t kFewShares = 64;

}  // namespace

// Micro-batches of each data rank by its pace; `caps`: most units of each.
std::vector<int> LayoutFit::spread(const std::vector<double>& pace,
                                   const std::vector<int>& caps) const {
  if (!layout_->micro_batch_sizes.empty()) {
    return cover_samples(units_, pace, layout_->micro_batch_sizes, caps);
  }
  std::vector<int> counts = spread_micro_batches(static_cast<int>(units_), pace, caps);
  for (int& count : counts) {
    count *= together_;
  }
  return counts;
}

int64_t LayoutFit::unit(size_t data_rank) const {
  return layout_->micro_batch_sizes.empty() ? 1 : layout_->micro_batch_sizes[data_rank];
}

// Seconds per micro-batch of a data rank of this kind, were all of its stages equally long.
double LayoutFit::perfect_pace(const Kind& kind) {
  double speed = 0;
  for (size_t stage = 0; stage < kind.types.size(); ++stage) {
    double whole = 0;
    for (const double own : block_seconds(kind, static_cast<int>(stage))) {
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
    layout_->num_micro_batches = {
        static_cast<int>((units_ + layout_->data - 1) / layout_->data * together_)};
    return;
  }
  const std::vector<int>& first = layout_->first_block;
  const bool cut = first.size() == 1 || first.back() > 0;
  std::vector<double> pace;
  for (const Kind& kind : kinds_) {
    std::vector<double> stages(kind.types.size(), 0);
    for (size_t s = 0; s < first.size(); ++s) {
      const size_t stage = s % stages.size();
      const std::vector<double>& seconds = block_seconds(kind, static_cast<int>(stage));
      const size_t end = s + 1 < first.size() ? static_cast<size_t>(first[s + 1]) : seconds.size();
      for (auto b = static_cast<size_t>(first[s]); cut && b < end; ++b) {
        stages[stage] += seconds[b];
      }
    }
    pace.push_back(cut ? *std::max_element(stages.begin(), stages.end()) : perfect_pace(kind));
  }
  layout_->num_micro_batches = spread(pace, {});
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

// Takes from the slowest data rank, and gives what it held to those that then end first.
bool LayoutFit::improve_shares() {
  if (fixed_ || request_.uniform || layout_->data == 1) {
    return false;
  }
  known_.clear();
  bool changed = false;
  std::vector<int>& counts = layout_->num_micro_batches;
  const auto seconds_of = [&](size_t r, int more) {
    return rank_seconds(static_cast<int>(r), counts[r] + more);
  };
  while (true) {
    const std::vector<int> present = counts;
    int64_t spare = -units_;
    size_t slowest = 0;
    for (size_t r = 0; r < counts.size(); ++r) {
      spare += counts[r] / together_ * unit(r);
      slowest = seconds_of(r, 0) > seconds_of(slowest, 0) ? r : slowest;
    }
    const double most = seconds_of(slowest, 0);
    counts[slowest] -= together_;
    spare -= unit(slowest);
    while (spare < 0) {
      size_t taker = counts.size();
      for (size_t r = 0; r < counts.size(); ++r) {
        if (r != slowest &&
            (taker == counts.size() || seconds_of(r, together_) < seconds_of(taker, together_))) {
          taker = r;
        }
      }
      if (seconds_of(taker, together_) >= kFaster * most) {
        counts = present;
        return changed;
      }
      counts[taker] += together_;
      spare += unit(taker);
    }
    for (size_t r = 0; r < counts.size(); ++r) {
      while (counts[r] > 0 && spare >= unit(r)) {
        counts[r] -= together_;
        spare -= unit(r);
      }
    }
    if (shortage() > 0) {
      counts = present;
      settle_recompute();
      return changed;
    }
    changed = true;
  }
}

// All ways to share of which no data rank could do without a micro-batch; none where there are
// many.
std::vector<std::vector<int>> LayoutFit::all_shares() const {
  const size_t n = kinds_.size();
  std::vector<std::vector<int>> ways;
  std::vector<int> counts(n, 0);
  int64_t looks = 0;
  const std::function<void(size_t, int64_t)> extend = [&](size_t r, int64_t left) {
    const auto most = std::max<int64_t>(0, (left + unit(r) - 1) / unit(r));
    for (int64_t own = r + 1 == n ? most : 0; own <= most && looks <= kFewShares; ++own) {
      counts[r] = static_cast<int>(own) * together_;
      const int64_t rest = left - own * unit(r);
      if (r + 1 < n) {
        extend(r + 1, rest);
        continue;
      }
      ++looks;
      bool superfluous = false;
      for (size_t i = 0; i < n; ++i) {
        superfluous = superfluous || (counts[i] > 0 && rest + unit(i) <= 0);
      }
      if (!superfluous) {
        ways.push_back(counts);
      }
    }
  };
  extend(0, units_);
  return looks <= kFewShares ? ways : std::vector<std::vector<int>>{};
}

// Shares to begin from beside the present ones, those with the least work for the busiest first.
std::vector<std::vector<int>> LayoutFit::other_shares() {
  std::vector<std::vector<int>> starts;
  if (fixed_ || request_.uniform || layout_->data == 1) {
    return starts;
  }
  starts = all_shares();
  if (!starts.empty()) {
    return starts;
  }
  // Each set of kinds that some data rank is not of.
  std::vector<Kind> kinds = kinds_;
  std::sort(kinds.begin(), kinds.end());
  kinds.erase(std::unique(kinds.begin(), kinds.end()), kinds.end());
  constexpr size_t kMostKinds = 4;
  for (size_t set = 1; kinds.size() <= kMostKinds && set + 1 < size_t{1} << kinds.size(); ++set) {
    std::vector<double> pace;
    std::vector<int> caps;
    for (const Kind& kind : kinds_) {
      const auto at = std::find(kinds.begin(), kinds.end(), kind) - kinds.begin();
      pace.push_back(perfect_pace(kind));
      caps.push_back((set >> at & 1) != 0 ? static_cast<int>(units_) : 0);
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

}  // namespace trainrt
