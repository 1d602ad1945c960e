// What every rank of a plan allocates, to the byte, from the programs of a pipeline of one stage of
// each kind: a hundred virtual stages are of a handful of kinds.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "planner/program_memory.h"
#include "planner/short_model.h"

namespace trainrt {

// Where programs come from: the forward graph at a micro-batch size, and the training graph, as a
// run has it, of a part of that. Called from several threads.
struct ProgramSource {
  ForwardGraph forward;
  std::function<TrainingGraph(Graph forward, int64_t micro_batch, bool accumulate)> train;
};

// By rank; nothing where the parts do not add up. `device`: the spec of each rank's device.
std::optional<std::vector<RankMemory>> short_program_memory(
    const ProgramSource& source,
    const Plan& plan,
    const std::function<DeviceSpec(int rank)>& device);

}  // namespace trainrt
