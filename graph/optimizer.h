// The update as nodes: gradients, their global norm, clipping and one fused optimizer operator per
// parameter, all in Region::kUpdate and in place.
#pragma once

#include <vector>

#include "graph/graph.h"
#include "graph/training_graph.h"

namespace trainrt {

// One trained parameter and the value that holds its complete gradient.
struct ParameterGradient {
  ValueId parameter = kNoValue;
  ValueId gradient = kNoValue;
};

// Throws kInvalidArgument for an unknown optimizer or a hyperparameter out of range.
void check_optimizer(const OptimizerSpec& spec);

// Appends the update and its StateUpdates to `graph`; returns the global norm before clipping
// (float32 scalar). Every update waits for the norm: one that is not finite leaves all parameters
// and optimizer states as they are. That costs the memory of all gradients at once, but what a bad
// step leaves behind is known.
ValueId build_update(Graph& graph,
                     const std::vector<ParameterGradient>& parameters,
                     const OptimizerSpec& spec);

}  // namespace trainrt
