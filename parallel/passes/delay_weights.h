// PipeDream-2BW's rule: W(t+1) = W(t) - step(gradient at W(t-1)); the first update has no delay
// (Narayanan et al., arXiv 2006.09503, section 3.2).
//
// Before the update of step t a parameter is what the forwards of step t + 1 read, and the update
// moves it to where their backwards look. So those forwards may run before the update (which is
// what keeps the pipeline full from step to step: parallel/passes/run_on.h), and two versions are
// enough.
//
// In a step that float16 skips the parameter stays and the older version still moves up to it: the
// next gradient then has no delay, as the first has none.
#pragma once

#include "graph/training_graph.h"

namespace trainrt {

// Adds to every trained parameter p the version before it, "p.previous", a parameter like p:
// forward and backward read that one, and the update moves p into it before it changes p.
TrainingGraph delay_weights(TrainingGraph whole);

// The name of the older version of a parameter.
std::string previous_version(const std::string& parameter);

}  // namespace trainrt
