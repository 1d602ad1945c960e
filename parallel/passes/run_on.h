// Whether the steps of a 2BW pipeline go over into each other, and the update that this wants.
//
// A rank runs the first p - 1 - r forwards of a step among the last backwards of the one before
// (make_window), with weights that the update of that step is about to put aside for their
// backwards (parallel/passes/delay_weights.h). What all stages would wait for at the end of a step
// has to go, or the pipeline would be empty there after all: no update asks for the gradient's
// norm, which is made on the first stage alone, the last to end a step; and its rank 0 alone is
// told the losses (gather_step).
#pragma once

#include <string>

#include "graph/training_graph.h"
#include "parallel/plan.h"

namespace trainrt {

// Why each step of a plan whose schedule goes on has to end with an empty pipeline: something about
// the update is decided by all stages together. "": it does not have to.
std::string reason_to_drain(const Plan& plan, const Graph& graph);
// Whether steps of training go over into each other.
bool runs_on(const Plan& plan, const Graph& graph);

// Takes the norm of the gradient out of the update, which does not clip.
TrainingGraph update_without_norm(TrainingGraph whole);

}  // namespace trainrt
