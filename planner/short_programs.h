// What every rank of a plan allocates, from the programs of a pipeline of one stage of each kind: a
// hundred virtual stages are of a handful of kinds. Stages of many equal layers are compiled at two
// smaller lengths: what they keep grows by as much with every layer, to the byte; what they need
// beside it may differ by a gap between tensors.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "planner/program_memory.h"
#include "planner/short_model.h"

namespace trainrt {

// Where programs come from: the forward graph at a micro-batch size, and the training graph, as a
// run has it, of a part of that. Called from two threads.
struct ProgramSource {
  ForwardGraph forward;
  std::function<TrainingGraph(Graph forward, int64_t micro_batch, bool accumulate)> train;
};

struct ShortMemory {
  std::vector<RankMemory> ranks;
  bool exact = true;  // to the byte: all stages were compiled at their length
};

// Nothing where the parts do not add up, or there would be nothing gained. `device`: the spec of
// each rank's device.
std::optional<ShortMemory> short_program_memory(const ProgramSource& source,
                                                const Plan& plan,
                                                const std::function<DeviceSpec(int rank)>& device);

}  // namespace trainrt
