// The points of the search: degrees, schedules and device orders that the model, cluster and pins
// allow, before anything is priced.
#pragma once

#include <vector>

#include "planner/planner.h"

namespace trainrt {

// Degrees with devices left idle are offered only where nothing uses them all, or for other
// objectives than speed.
struct Degrees {
  int data = 1, tensor = 1, pipeline = 1;
};
std::vector<Degrees> candidate_degrees(const PlanRequest& request, int num_blocks);

// Micro-batch sizes for `samples` per data rank: powers of two, all samples at once, and what cuts
// them into two, three or four alike. Ascending.
std::vector<int64_t> candidate_micro_batches(const PlanRequest& request, int64_t samples);

// The same where data ranks have sizes of their own: a fast one may take more than its even part.
std::vector<int64_t> mixed_micro_batches(const PlanRequest& request, int64_t samples);

// What devices of a mixed cluster are put in order by: bytes a second.
double pace_of(const DeviceType& type);

// Orders of devices along the ranks; the first is the plain one (empty). Several for mixed
// clusters: types along the pipeline, fast first or slow first, or along the data ranks. Where
// ranks have places only those that keep to them.
std::vector<std::vector<int>> candidate_device_orders(const PlanRequest& request,
                                                      const Degrees& degrees);

// Throws kInvalidArgument when pins contradict each other or the cluster.
void check_pins(const PlanRequest& request);

}  // namespace trainrt
