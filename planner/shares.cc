// Greedy: the next micro-batch goes to the rank that would end first with it. Optimal for costs
// that do not decrease with the count. Water-filling gives all but the last few at once, so that a
// step of many micro-batches over many ranks costs O(ranks^2) and not O(micro-batches * ranks).
#include "planner/shares.h"

#include <algorithm>
#include <cmath>

namespace trainrt {

std::vector<int> spread_micro_batches(int total,
                                      const std::vector<double>& seconds,
                                      const std::vector<int>& caps) {
  const size_t n = seconds.size();
  double rate = 0;
  for (const double s : seconds) {
    rate += 1 / s;
  }
  std::vector<int> counts(n, 0);
  int left = total;
  for (size_t i = 0; i < n; ++i) {
    // Below the real-valued optimum by one: greedy would give these in any order.
    int base = std::max(0, static_cast<int>(std::floor(total / seconds[i] / rate)) - 1);
    base = caps.empty() ? base : std::min(base, caps[i]);
    counts[i] = base;
    left -= base;
  }
  for (; left > 0; --left) {
    int best = -1;
    double ends = 0;
    for (size_t i = 0; i < n; ++i) {
      if (!caps.empty() && counts[i] >= caps[i]) {
        continue;
      }
      const double own = seconds[i] * (counts[i] + 1);
      if (best < 0 || own <= ends * (1 + 1e-12)) {
        best = static_cast<int>(i);
        ends = own;
      }
    }
    if (best < 0) {
      return {};
    }
    ++counts[static_cast<size_t>(best)];
  }
  return counts;
}

}  // namespace trainrt
