// Steps of building a training graph that its two builders share: from a forward graph with a loss
// (training_graph.cc) and from a model's training_info (onnx_training_info.cc).
#pragma once

#include <string>
#include <vector>

#include "graph/loss.h"
#include "graph/training_graph.h"

namespace trainrt {

// The gradient of one parameter, complete when the update reads it: the contributions of its uses,
// accumulated over micro-batches if `accumulated`, and summed in order.
ValueId complete_gradient(Graph& graph,
                          const std::string& parameter,
                          std::vector<ValueId> uses,
                          bool accumulated);

// Drops what nobody reads any more, verifies, and finds the named values again.
TrainingGraph finish_training_graph(Graph graph,
                                    const LossValues& loss,
                                    ValueId grad_norm,
                                    std::vector<std::string> parameters);

}  // namespace trainrt
