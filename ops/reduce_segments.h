// How the CUDA kernels of the reductions cut their work: a rule of the shapes alone, so that a plan
// knows the workspace and equal shapes give equal bits.
#pragma once

#include <algorithm>
#include <cstdint>

namespace trainrt::reduce {

// Parts into which the `count` elements of each output are cut. Where the innermost dim is kept
// (`columns`) one thread walks down the elements of an output, and a GPU wants 2^17 threads; else a
// team of lanes shares them.
inline int64_t device_segments(int64_t outputs, int64_t count, bool columns) {
  constexpr int64_t kThreads = 1 << 17, kLeastRows = 32, kTeamElements = 1 << 14;
  const auto parts = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  if (!columns) {
    return std::max<int64_t>(1, parts(count, kTeamElements));
  }
  return std::clamp<int64_t>(parts(kThreads, std::max<int64_t>(1, outputs)),
                             1,
                             std::max<int64_t>(1, parts(count, kLeastRows)));
}

}  // namespace trainrt::reduce
