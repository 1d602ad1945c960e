#include "runtime/rebalancer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "graph/base/error.h"

namespace trainrt {

namespace {

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

bool differs(double a, double b, double part) {
  return std::abs(a - b) > part * b;
}

}  // namespace

Rebalancer::Rebalancer(std::vector<int64_t> units, int64_t least, RebalanceRule rule)
    : units_(std::move(units)),
      least_(least),
      rule_(rule),
      caps_(units_.size(), std::numeric_limits<int64_t>::max()),
      costs_(units_.size()) {
  TRAINRT_CHECK(rule_.window > 0 && least_ > 0);
}

std::optional<std::vector<int64_t>> Rebalancer::observe(const std::vector<double>& seconds) {
  TRAINRT_CHECK(seconds.size() == units_.size());
  if (fresh_) {
    fresh_ = false;
    return std::nullopt;
  }
  window_.push_back(seconds);
  if (window_.size() < steps_) {
    return std::nullopt;
  }
  std::vector<double> medians;
  for (size_t rank = 0; rank < units_.size(); ++rank) {
    std::vector<double> of_rank;
    for (const std::vector<double>& step : window_) {
      of_rank.push_back(step[rank]);
    }
    medians.push_back(median(of_rank));
    if (units_[rank] > 0 && medians[rank] <= 0) {
      window_.clear();
      return std::nullopt;  // too short to be measured
    }
  }
  window_.clear();
  learn(medians);
  return rests(medians) ? std::nullopt : propose();
}

// What this window says of the ranks: a line through its point and that of other units before it.
void Rebalancer::learn(const std::vector<double>& seconds) {
  for (size_t rank = 0; rank < units_.size(); ++rank) {
    RankCost& cost = costs_[rank];
    const auto units = static_cast<double>(units_[rank]);
    if (units == 0) {
      continue;
    }
    if (cost.units == units_[rank]) {
      if (differs(seconds[rank], cost.seconds, rule_.change)) {
        cost.fixed = 0;
      }
    } else if (cost.units > 0) {
      const double slope =
          (seconds[rank] - cost.seconds) / (units - static_cast<double>(cost.units));
      // Less time for more work, or a line that begins below zero: the device itself has changed.
      const double fixed = seconds[rank] - slope * units;
      cost.fixed = slope < 0 || fixed < 0 ? 0 : fixed;
    }
    cost.fixed = cost.fixed > seconds[rank] ? 0 : cost.fixed;
    cost.per_unit = (seconds[rank] - cost.fixed) / units;
    cost.units = units_[rank];
    cost.seconds = seconds[rank];
  }
}

// Whether moves have brought too little, and no rank has changed since.
bool Rebalancer::rests(const std::vector<double>& seconds) {
  if (enough_ > 0) {
    const bool kept = *std::max_element(seconds.begin(), seconds.end()) <= enough_;
    misses_ = kept ? 0 : misses_ + 1;
    enough_ = 0;
    if (misses_ > rule_.most_misses) {
      resting_at_ = seconds;
    }
  }
  for (size_t rank = 0; rank < resting_at_.size(); ++rank) {
    if (differs(seconds[rank], resting_at_[rank], rule_.change)) {
      resting_at_.clear();
      misses_ = 0;
    }
  }
  return !resting_at_.empty();
}

// Each rank that takes part keeps `least_`; what is left goes, one by one, where it ends first, and
// to the later of equals. Empty where that is not enough work, or too much for the caps.
std::vector<int64_t> Rebalancer::spread() const {
  int64_t left = std::accumulate(units_.begin(), units_.end(), int64_t{0});
  std::vector<int64_t> units(units_.size(), 0);
  for (size_t rank = 0; rank < units.size(); ++rank) {
    units[rank] = units_[rank] > 0 ? least_ : 0;
    left -= units[rank];
  }
  for (; left > 0; --left) {
    size_t first = units.size();
    double ends = 0;
    for (size_t rank = 0; rank < units.size(); ++rank) {
      const RankCost& cost = costs_[rank];
      const double own = cost.fixed + cost.per_unit * static_cast<double>(units[rank] + 1);
      const bool takes_part = units_[rank] > 0 && units[rank] < caps_[rank];
      if (takes_part && (first == units.size() || own <= ends * (1 + 1e-12))) {
        first = rank;
        ends = own;
      }
    }
    if (first == units.size()) {
      return {};
    }
    ++units[first];
  }
  return left == 0 ? units : std::vector<int64_t>{};
}

double Rebalancer::slowest(const std::vector<int64_t>& units) const {
  double most = 0;
  for (size_t rank = 0; rank < units.size(); ++rank) {
    const RankCost& cost = costs_[rank];
    const double own = cost.fixed + cost.per_unit * static_cast<double>(units[rank]);
    most = std::max(most, units[rank] > 0 ? own : 0);
  }
  return most;
}

std::optional<std::vector<int64_t>> Rebalancer::propose() {
  const std::vector<int64_t> units = spread();
  if (units.empty()) {
    return std::nullopt;
  }
  promised_ = slowest(units) / slowest(units_);
  return promised_ <= 1 - rule_.least_gain ? std::optional(units) : std::nullopt;
}

void Rebalancer::adopt(const std::vector<int64_t>& units) {
  enough_ = (slowest(units) + slowest(units_)) / 2;
  units_ = units;
  steps_ = std::min(2 * steps_, rule_.longest_window);
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
