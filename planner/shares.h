// How many micro-batches each data rank runs, when data ranks differ in speed.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

namespace trainrt {

// `total` micro-batches over ranks with `seconds` per micro-batch and at most `caps` each (empty:
// no caps), such that the slowest rank ends first. Ties go to the later rank. Empty when the caps
// hold less than `total`.
std::vector<int> spread_micro_batches(int total,
                                      const std::vector<double>& seconds,
                                      const std::vector<int>& caps);

// The same where the micro-batches of a rank have `sizes` samples: enough to hold `samples`, and
// none that could be left out.
std::vector<int> cover_samples(int64_t samples,
                               const std::vector<double>& seconds,
                               const std::vector<int64_t>& sizes,
                               const std::vector<int>& caps);

// Samples of each rank, whose micro-batches hold them all and of which each gets one at least:
// the last ones of the later ranks are short. Empty where there are not that many.
std::vector<int64_t> samples_of(int64_t samples,
                                const std::vector<int>& counts,
                                const std::vector<int64_t>& sizes);

// Samples of a micro-batch of each kind of data rank, so that `each` of them on every data rank
// hold `samples` and take all equally long; and how long. `seconds`: of a micro-batch, by kind and
// by its samples, two sizes at least; in between and beyond them straight lines. `kinds`: by data
// rank.
struct PacedSizes {
  std::vector<int64_t> sizes;
  double seconds = 0;
};
PacedSizes paced_sizes(int64_t samples,
                       int each,
                       const std::vector<std::map<int64_t, double>>& seconds,
                       const std::vector<int>& kinds);

}  // namespace trainrt
