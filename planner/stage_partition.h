// Where to cut a chain of blocks into pipeline stages.
#pragma once

#include <vector>

namespace trainrt {

// First block of each stage, such that the largest stage time is least. `seconds[s][b]`: time of
// block b on stage s (stages may lie on different devices). Every stage gets at least one block;
// needs stages <= blocks.
std::vector<int> balanced_cuts(const std::vector<std::vector<double>>& seconds);

}  // namespace trainrt
