// Where the chain of blocks is cut into pipeline stages.
#pragma once

#include <cstdint>
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

// Whether there are at most `most` ways to cut so many blocks into first->size() stages; calls fn
// with each in *first if so, until it returns true.
bool for_all_cuts(int num_blocks,
                  int64_t most,
                  std::vector<int>* first,
                  const std::function<bool()>& fn);

// Equal cuts by block count with the first and last block counted as half a layer each, the classic
// rule: what engines without their own rule do.
std::vector<int> even_cuts(int num_blocks, int num_virtual_stages);

}  // namespace trainrt
