// Pairwise covers: few rows in which every pair of values of two factors occurs.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace trainrt::testing {

// Rows with one value (0 .. sizes[f] - 1) per factor. Greedy: of `tries` random rows that `allowed`
// accepts, the one with most pairs that no row has yet; ends when no try brings a new one.
std::vector<std::vector<int>> pairwise_cover(
    const std::vector<int>& sizes,
    uint64_t seed,
    const std::function<bool(const std::vector<int>&)>& allowed,
    int tries = 200);

}  // namespace trainrt::testing
