#include "runtime/rebalancer.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "graph/base/error.h"
#include "planner/shares.h"

namespace trainrt {

namespace {

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double slowest(const std::vector<int64_t>& units, const std::vector<double>& seconds_per_unit) {
  double most = 0;
  for (size_t rank = 0; rank < units.size(); ++rank) {
    most = std::max(most, static_cast<double>(units[rank]) * seconds_per_unit[rank]);
  }
  return most;
}

}  // namespace

Rebalancer::Rebalancer(std::vector<int64_t> units, int64_t least, RebalanceRule rule)
    : units_(std::move(units)),
      least_(least),
      rule_(rule),
      caps_(units_.size(), std::numeric_limits<int32_t>::max()) {
  TRAINRT_CHECK(rule_.window > 0 && least_ > 0);
}

std::optional<std::vector<int64_t>> Rebalancer::observe(const std::vector<double>& seconds) {
  TRAINRT_CHECK(seconds.size() == units_.size());
  if (fresh_) {
    fresh_ = false;
    return std::nullopt;
  }
  window_.push_back(seconds);
  if (window_.size() < rule_.window) {
    return std::nullopt;
  }
  seconds_per_unit_.assign(units_.size(), 0);
  for (size_t rank = 0; rank < units_.size(); ++rank) {
    std::vector<double> of_rank;
    for (const std::vector<double>& step : window_) {
      of_rank.push_back(step[rank]);
    }
    if (units_[rank] > 0) {
      seconds_per_unit_[rank] = median(of_rank) / static_cast<double>(units_[rank]);
    }
  }
  window_.clear();
  return propose();
}

// Each rank that takes part keeps `least_`; what is left is spread such that the slowest ends
// first.
std::optional<std::vector<int64_t>> Rebalancer::propose() {
  std::vector<size_t> active;
  std::vector<double> seconds;
  std::vector<int> caps;
  for (size_t rank = 0; rank < units_.size(); ++rank) {
    if (units_[rank] > 0) {
      if (seconds_per_unit_[rank] <= 0) {
        return std::nullopt;  // too short to be measured
      }
      active.push_back(rank);
      seconds.push_back(seconds_per_unit_[rank]);
      caps.push_back(static_cast<int>(caps_[rank]));
    }
  }
  const int total = static_cast<int>(std::accumulate(units_.begin(), units_.end(), int64_t{0}));
  std::vector<int> spread = spread_micro_batches(total, seconds, caps);
  if (spread.empty()) {
    return std::nullopt;
  }
  for (int& own : spread) {
    while (own < least_) {
      const auto most = std::max_element(spread.begin(), spread.end());
      if (*most <= least_) {
        return std::nullopt;
      }
      --*most;
      ++own;
    }
  }
  std::vector<int64_t> units(units_.size(), 0);
  for (size_t i = 0; i < active.size(); ++i) {
    units[active[i]] = spread[i];
  }
  const double before = slowest(units_, seconds_per_unit_);
  promised_ = slowest(units, seconds_per_unit_) / before;
  return promised_ <= 1 - rule_.least_gain ? std::optional(units) : std::nullopt;
}

void Rebalancer::adopt(const std::vector<int64_t>& units) {
  units_ = units;
  window_.clear();
  fresh_ = true;
}

std::optional<std::vector<int64_t>> Rebalancer::reject(const std::vector<bool>& over) {
  TRAINRT_CHECK(std::find(over.begin(), over.end(), true) != over.end());
  for (size_t rank = 0; rank < over.size(); ++rank) {
    if (over[rank]) {
      caps_[rank] = std::min(caps_[rank], units_[rank]);
    }
  }
  return propose();
}

}  // namespace trainrt
