// Bisection on the largest stage time T: filling stages from the left, each up to T, needs the
// fewest stages for a given T, also when stages differ in speed but keep their order. Every stage
// must leave a block for each stage after it. Exact to the last bit of T that changes the cuts; 60
// rounds of O(N).
#include "planner/stage_partition.h"

#include <algorithm>

#include "graph/base/error.h"

namespace trainrt {

namespace {

// Cuts for largest stage time `limit`; empty when blocks are left over.
std::vector<int> fill(const std::vector<std::vector<double>>& seconds, double limit) {
  const int stages = static_cast<int>(seconds.size());
  const int blocks = static_cast<int>(seconds[0].size());
  std::vector<int> first;
  int next = 0;
  for (int s = 0; s < stages; ++s) {
    first.push_back(next);
    const int reserved = stages - 1 - s;
    double sum = 0;
    bool empty = true;
    while (next < blocks - reserved) {
      const double own = seconds[static_cast<size_t>(s)][static_cast<size_t>(next)];
      if (sum + own > limit && !empty) {
        break;
      }
      if (sum + own > limit) {
        return {};  // this block fits no stage alone
      }
      sum += own;
      empty = false;
      ++next;
    }
  }
  return next == blocks ? first : std::vector<int>{};
}

std::vector<int> cut_unequal(const std::vector<std::vector<double>>& seconds) {
  const int stages = static_cast<int>(seconds.size());
  const int blocks = static_cast<int>(seconds[0].size());
  std::vector<std::vector<double>> sums;  // prefix sums by stage
  for (const std::vector<double>& stage : seconds) {
    std::vector<double> prefix(1, 0);
    for (const double own : stage) {
      prefix.push_back(prefix.back() + own);
    }
    sums.push_back(std::move(prefix));
  }
  const auto rows = static_cast<size_t>(stages), columns = static_cast<size_t>(blocks) + 1;
  std::vector<std::vector<double>> best(rows, std::vector<double>(columns, 1e300));
  std::vector<std::vector<int>> first(rows, std::vector<int>(columns, 0));
  for (int s = 0; s < stages; ++s) {
    const auto row = static_cast<size_t>(s);
    for (int b = s + 1; b <= blocks; ++b) {
      const double end = sums[row][static_cast<size_t>(b)];
      if (s == 0) {
        best[row][static_cast<size_t>(b)] = end;
        continue;
      }
      const auto before = [&](int k) { return best[row - 1][static_cast<size_t>(k)]; };
      const auto own = [&](int k) { return end - sums[row][static_cast<size_t>(k)]; };
      for (int k = s; k < b; ++k) {
        if (std::max(before(k), own(k)) < best[row][static_cast<size_t>(b)]) {
          best[row][static_cast<size_t>(b)] = std::max(before(k), own(k));
          first[row][static_cast<size_t>(b)] = k;
        }
      }
    }
  }
  std::vector<int> cuts(rows, 0);
  for (int s = stages - 1, b = blocks; s > 0; --s) {
    b = first[static_cast<size_t>(s)][static_cast<size_t>(b)];
    cuts[static_cast<size_t>(s)] = b;
  }
  return cuts;
}

}  // namespace

std::vector<int> balanced_cuts(const std::vector<std::vector<double>>& seconds) {
  TRAINRT_CHECK(!seconds.empty() && seconds.size() <= seconds[0].size(), "more stages than blocks");
  if (std::any_of(
          seconds.begin(), seconds.end(), [&](const auto& row) { return row != seconds[0]; })) {
    return cut_unequal(seconds);
  }
  double high = 0;
  for (const std::vector<double>& stage : seconds) {
    double sum = 0;
    for (const double own : stage) {
      sum += own;
    }
    high = std::max(high, sum);
  }
  double low = 0;
  std::vector<int> best = fill(seconds, high * (1 + 1e-9) + 1e-300);
  TRAINRT_CHECK(!best.empty(), "no cut at all");
  for (int round = 0; round < 60; ++round) {
    const double middle = (low + high) / 2;
    std::vector<int> cuts = fill(seconds, middle);
    if (cuts.empty()) {
      low = middle;
    } else {
      high = middle;
      best = std::move(cuts);
    }
  }
  return best;
}

}  // namespace trainrt
