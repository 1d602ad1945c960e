// PipeDream-2BW's rule: W(t+1) = W(t) - step(gradient at W(t-1)); the first update has no delay
// (Narayanan et al., arXiv 2006.09503, section 3.2).
//
// The rule is whole, its gain is not: the pipeline still drains at the end of each step, which
// leaves (p - 1) / (m + p - 1) of it idle. To go on, a rank must run the first p - 1 - r forwards
// of step t+1 among the last backwards of step t. What that wants:
//   - no third version: before the update of step t the parameter itself is what those forwards are
//     to read, and the update moves it to where their backwards will look. So it takes a variant of
//     the forward that reads the parameter;
//   - stash slots that are counted on over steps, and phases of once per step (R, U) beside the
//     slots instead of over them. Items are counted on the last stage, where nothing is in flight;
//   - an executor and trainer with two batches open, and rows for steps that fill and steps that
//     drain: the last, one before a checkpoint, a new plan, or a batch of another size;
//   - nothing that all stages wait for once per step. Today there are three: the sum of the loss,
//     checked before the update; the norm of the gradient; the question whether to stop. Each has
//     to come a step late, and what decides about the update itself (--clip-norm, fp16's overflow)
//     to be refused, as the reference's no-flush mode skips both.
#pragma once

#include "graph/training_graph.h"

namespace trainrt {

// Adds to every trained parameter p the version before it, "p.previous", a parameter like p:
// forward and backward read that one, and the update moves p into it before it changes p.
TrainingGraph delay_weights(TrainingGraph whole);

// The name of the older version of a parameter.
std::string previous_version(const std::string& parameter);

}  // namespace trainrt
