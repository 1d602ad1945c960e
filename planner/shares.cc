// Greedy: the next micro-batch goes to the rank that would end first with it. Optimal for costs
// that do not decrease with the count. Water-filling gives all but the last few at once, so that a
// step of many micro-batches over many ranks costs O(ranks^2) and not O(micro-batches * ranks).
#include "planner/shares.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

namespace trainrt {

namespace {

// Along straight lines through the points, the outer ones beyond them.
double seconds_at(const std::map<int64_t, double>& points, int64_t size) {
  auto right = points.lower_bound(size);
  right = right == points.begin() ? std::next(right) : right;
  right = right == points.end() ? std::prev(right) : right;
  const auto left = std::prev(right);
  const double slope =
      (right->second - left->second) / static_cast<double>(right->first - left->first);
  return left->second + slope * static_cast<double>(size - left->first);
}

}  // namespace

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

std::vector<int> cover_samples(int64_t samples,
                               const std::vector<double>& seconds,
                               const std::vector<int64_t>& sizes,
                               const std::vector<int>& caps) {
  const size_t n = seconds.size();
  double rate = 0;  // samples per second
  for (size_t i = 0; i < n; ++i) {
    rate += static_cast<double>(sizes[i]) / seconds[i];
  }
  std::vector<int> counts(n, 0);
  int64_t left = samples;
  for (size_t i = 0; i < n; ++i) {
    const int base = std::max(
        0, static_cast<int>(std::floor(static_cast<double>(samples) / rate / seconds[i])) - 1);
    counts[i] = caps.empty() ? base : std::min(base, caps[i]);
    left -= counts[i] * sizes[i];
  }
  while (left > 0) {
    size_t best = n;
    double ends = 0;
    for (size_t i = 0; i < n; ++i) {
      const double own = seconds[i] * (counts[i] + 1);
      if ((caps.empty() || counts[i] < caps[i]) && (best == n || own <= ends * (1 + 1e-12))) {
        best = i;
        ends = own;
      }
    }
    if (best == n) {
      return {};
    }
    ++counts[best];
    left -= sizes[best];
  }
  for (;;) {  // what those that came after an earlier one have made superfluous
    size_t last = n;
    for (size_t i = 0; i < n; ++i) {
      if (counts[i] > 0 && left + sizes[i] <= 0 &&
          (last == n || seconds[i] * counts[i] > seconds[last] * counts[last])) {
        last = i;
      }
    }
    if (last == n) {
      return counts;
    }
    --counts[last];
    left += sizes[last];
  }
}

std::vector<int64_t> samples_of(int64_t samples,
                                const std::vector<int>& counts,
                                const std::vector<int64_t>& sizes) {
  std::vector<int64_t> result;
  int64_t spare = -samples;
  for (size_t i = 0; i < counts.size(); ++i) {
    result.push_back(counts[i] * sizes[i]);
    spare += result.back();
  }
  for (size_t i = counts.size(); i-- > 0 && spare > 0;) {
    const int64_t less = counts[i] > 0 ? std::min(spare, sizes[i] - 1) : 0;
    result[i] -= less;
    spare -= less;
  }
  return spare == 0 ? result : std::vector<int64_t>{};
}

PacedSizes paced_sizes(int64_t samples,
                       int each,
                       const std::vector<std::map<int64_t, double>>& seconds,
                       const std::vector<int>& kinds) {
  const int64_t wanted = (samples + each - 1) / each;  // in one micro-batch of every data rank
  std::vector<int64_t> ranks(seconds.size(), 0);
  for (const int kind : kinds) {
    ++ranks[static_cast<size_t>(kind)];
  }
  // The largest sizes that take no longer than `limit`, one sample at least.
  const auto sizes_within = [&](double limit) {
    std::vector<int64_t> sizes;
    for (const std::map<int64_t, double>& points : seconds) {
      int64_t size = 1, beyond = wanted + 1;
      while (size + 1 < beyond) {
        const int64_t middle = size + (beyond - size) / 2;
        (seconds_at(points, middle) <= limit ? size : beyond) = middle;
      }
      sizes.push_back(size);
    }
    return sizes;
  };
  const auto spare = [&](const std::vector<int64_t>& sizes) {
    return std::inner_product(ranks.begin(), ranks.end(), sizes.begin(), -wanted);
  };
  double low = 0, high = 0;
  for (const std::map<int64_t, double>& points : seconds) {
    high = std::max(high, seconds_at(points, wanted));
  }
  constexpr int kHalvings = 40;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (low + high) / 2;
    (spare(sizes_within(middle)) >= 0 ? high : low) = middle;
  }
  PacedSizes paced = {sizes_within(high)};
  // Several kinds may have grown by a sample at the last; the first that can do without it do.
  for (size_t kind = 0; kind < ranks.size(); ++kind) {
    int64_t& size = paced.sizes[kind];
    size -= size > 1 && spare(paced.sizes) >= ranks[kind] ? 1 : 0;
    paced.seconds = std::max(paced.seconds, seconds_at(seconds[kind], size));
  }
  return paced;
}

}  // namespace trainrt
