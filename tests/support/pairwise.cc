#include "tests/support/pairwise.h"

#include <random>
#include <set>
#include <tuple>

namespace trainrt::testing {

std::vector<std::vector<int>> pairwise_cover(
    const std::vector<int>& sizes,
    uint64_t seed,
    const std::function<bool(const std::vector<int>&)>& allowed,
    int tries) {
  std::mt19937_64 random(seed);
  using Pair = std::tuple<size_t, int, size_t, int>;
  std::set<Pair> covered;
  const auto pairs_of = [&](const std::vector<int>& row) {
    std::vector<Pair> pairs;
    for (size_t a = 0; a < row.size(); ++a) {
      for (size_t b = a + 1; b < row.size(); ++b) {
        pairs.emplace_back(a, row[a], b, row[b]);
      }
    }
    return pairs;
  };
  std::vector<std::vector<int>> rows;
  for (;;) {
    std::vector<int> best;
    size_t most = 0;
    for (int i = 0; i < tries; ++i) {
      std::vector<int> row;
      for (const int size : sizes) {
        row.push_back(static_cast<int>(random() % static_cast<uint64_t>(size)));
      }
      if (!allowed(row)) {
        continue;
      }
      size_t fresh = 0;
      for (const Pair& pair : pairs_of(row)) {
        fresh += covered.count(pair) == 0 ? 1 : 0;
      }
      if (fresh > most) {
        most = fresh;
        best = row;
      }
    }
    if (most == 0) {
      return rows;
    }
    const std::vector<Pair> pairs = pairs_of(best);
    covered.insert(pairs.begin(), pairs.end());
    rows.push_back(std::move(best));
  }
}

}  // namespace trainrt::testing
