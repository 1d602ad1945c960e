// Where the chain of blocks is cut into pipeline stages.
#pragma once

#include <functional>
#include <vector>

namespace trainrt {

// Whether a stage has room for blocks [first, end). Must hold for any part of what it holds for.
using StageFits = std::function<bool(int stage, int first, int end)>;

// First block of each stage, such that the longest stage is shortest and every stage fits (null:
// whatever its size) and has a block; empty when there is no such cut. seconds[stage][block]: where
// stages are of different devices they differ.
std::vector<int> balanced_cuts(const std::vector<std::vector<double>>& seconds,
                               const StageFits& fits = nullptr);

}  // namespace trainrt
