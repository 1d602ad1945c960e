// How many micro-batches each data rank runs, when data ranks differ in speed.
#pragma once

#include <vector>

namespace trainrt {

// `total` micro-batches over ranks with `seconds` per micro-batch and at most `caps` each (empty:
// no caps), such that the slowest rank ends first. Ties go to the later rank. Empty when the caps
// hold less than `total`.
std::vector<int> spread_micro_batches(int total,
                                      const std::vector<double>& seconds,
                                      const std::vector<int>& caps);

}  // namespace trainrt
