// Stages alike: bisection on the largest stage time T. Filling stages from the left, each up to T
// and to its memory, needs the fewest stages for a given T: O(p log n) a round. Stages that differ,
// or a block that fits only later stages: dynamic programming over (stage, end), best[s][b] = min
// over k of max(best[s - 1][k], time of [k, b) on s), O(p n^2).
#include "planner/stage_partition.h"

#include <algorithm>
#include <numeric>

#include "graph/base/error.h"

namespace trainrt {

namespace {

constexpr double kNever = 1e300;

std::vector<double> prefix_sums(const std::vector<double>& seconds) {
  std::vector<double> sums(1, 0);
  for (const double own : seconds) {
    sums.push_back(sums.back() + own);
  }
  return sums;
}

// Cuts for largest stage time `limit`; empty when blocks are left over, or when a stage cannot hold
// the next block even alone (`stuck`: that block).
std::vector<int> fill(
    const std::vector<double>& sums, int stages, double limit, const StageFits& fits, int* stuck) {
  const int blocks = static_cast<int>(sums.size()) - 1;
  std::vector<int> first;
  first.reserve(static_cast<size_t>(stages));
  int next = 0;
  for (int s = 0; s < stages; ++s) {
    first.push_back(next);
    const int most = blocks - (stages - 1 - s);  // every later stage needs a block
    const auto stop = std::upper_bound(
        sums.begin() + next + 1, sums.begin() + most + 1, sums[static_cast<size_t>(next)] + limit);
    int end = static_cast<int>(stop - sums.begin()) - 1;
    if (end > next && fits != nullptr && !fits(s, next, end)) {
      int low = next, high = end;  // [next, low) fits, [next, high) does not
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (fits(s, next, middle) ? low : high) = middle;
      }
      end = low;
    }
    if (end == next) {
      *stuck = next;
      return {};
    }
    next = end;
  }
  return next == blocks ? first : std::vector<int>{};
}

std::vector<int> cut_unequal(const std::vector<std::vector<double>>& seconds,
                             const StageFits& fits) {
  const int stages = static_cast<int>(seconds.size());
  const int blocks = static_cast<int>(seconds[0].size());
  const auto rows = static_cast<size_t>(stages), columns = static_cast<size_t>(blocks) + 1;
  std::vector<std::vector<double>> best(rows, std::vector<double>(columns, kNever));
  std::vector<std::vector<int>> first(rows, std::vector<int>(columns, 0));
  std::vector<int> better;  // first blocks of a stage, each of which lowers the longest time
  for (int s = 0; s < stages; ++s) {
    const auto row = static_cast<size_t>(s);
    const std::vector<double> sums = prefix_sums(seconds[row]);
    const double* before = s == 0 ? nullptr : best[row - 1].data();
    for (int b = s + 1; b <= blocks - (stages - 1 - s); ++b) {
      double least = kNever;
      better.clear();
      for (int k = s == 0 ? 0 : b - 1; k >= s; --k) {  // the stage grows leftwards
        const double own = sums[static_cast<size_t>(b)] - sums[static_cast<size_t>(k)];
        if (own >= least) {
          break;
        }
        const double longest = s == 0 ? own : std::max(before[k], own);
        if (longest < least) {
          least = longest;
          better.push_back(k);
        }
      }
      // What a stage holds grows with it: mostly the last one fits, else [0, low) of them do.
      size_t low = better.size();
      if (fits != nullptr && low > 0 && !fits(s, better.back(), b)) {
        size_t high = low - 1;
        for (low = 0; low < high;) {
          const size_t middle = (low + high) / 2;
          if (fits(s, better[middle], b)) {
            low = middle + 1;
          } else {
            high = middle;
          }
        }
      }
      if (low > 0) {
        const int k = better[low - 1];
        const double own = sums[static_cast<size_t>(b)] - sums[static_cast<size_t>(k)];
        best[row][static_cast<size_t>(b)] = s == 0 ? own : std::max(before[k], own);
        first[row][static_cast<size_t>(b)] = k;
      }
    }
  }
  if (best.back().back() >= kNever) {
    return {};
  }
  std::vector<int> cuts(rows, 0);
  for (int s = stages - 1, b = blocks; s > 0; --s) {
    b = first[static_cast<size_t>(s)][static_cast<size_t>(b)];
    cuts[static_cast<size_t>(s)] = b;
  }
  return cuts;
}

}  // namespace

std::vector<int> balanced_cuts(const std::vector<std::vector<double>>& seconds,
                               const StageFits& fits) {
  TRAINRT_CHECK(!seconds.empty() && seconds.size() <= seconds[0].size(), "more stages than blocks");
  if (std::any_of(
          seconds.begin(), seconds.end(), [&](const auto& row) { return row != seconds[0]; })) {
    return cut_unequal(seconds, fits);
  }
  const std::vector<double> sums = prefix_sums(seconds[0]);
  const int stages = static_cast<int>(seconds.size());
  double high = sums.back() * (1 + 1e-9) + 1e-300;
  double low = high / (stages + 1);
  int stuck = -1;
  std::vector<int> best = fill(sums, stages, high, fits, &stuck);
  if (best.empty()) {
    // A block that fits some stage alone may want other cuts before it; else there is none.
    bool fits_some = false;
    for (int s = 0; s < stages && stuck >= 0 && !fits_some; ++s) {
      fits_some = fits == nullptr || fits(s, stuck, stuck + 1);
    }
    return fits_some ? cut_unequal(seconds, fits) : best;
  }
  for (int round = 0; round < 50 && high - low > 1e-12 * high; ++round) {
    const double middle = (low + high) / 2;
    std::vector<int> cuts = fill(sums, stages, middle, fits, &stuck);
    if (cuts.empty()) {
      low = middle;
    } else {
      high = middle;
      best = std::move(cuts);
    }
  }
  return best;
}

bool for_all_cuts(int num_blocks,
                  int64_t most,
                  std::vector<int>* first,
                  const std::function<bool()>& fn) {
  const auto stages = static_cast<int64_t>(first->size());
  int64_t ways = 1;
  for (int64_t s = 1; s < stages && ways <= most; ++s) {
    ways = ways * (num_blocks - s) / s;
  }
  if (ways > most) {
    return false;
  }
  std::iota(first->begin(), first->end(), 0);
  while (!fn()) {
    // The next one: the last border that has room moves, those after it close up.
    int64_t s = stages - 1;
    while (s > 0 && (*first)[static_cast<size_t>(s)] == num_blocks - (stages - s)) {
      --s;
    }
    if (s == 0) {
      break;
    }
    std::iota(first->begin() + s, first->end(), (*first)[static_cast<size_t>(s)] + 1);
  }
  return true;
}

std::vector<int> even_cuts(int num_blocks, int num_virtual_stages) {
  // Weights: 1 per inner block, 0 for the first and last, which ride along.
  const int inner = std::max(num_blocks - 2, num_virtual_stages);
  std::vector<int> first = {0};
  for (int s = 1; s < num_virtual_stages; ++s) {
    const int layers = static_cast<int>(static_cast<int64_t>(s) * inner / num_virtual_stages);
    first.push_back(std::min(num_blocks - 1, 1 + layers));
  }
  return first;
}

}  // namespace trainrt
