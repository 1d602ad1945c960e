// PipeDream-2BW's rule: W(t+1) = W(t) - step(gradient at W(t-1)); the first update has no delay
// (Narayanan et al., arXiv 2006.09503, section 3.2).
//
// The rule is whole, its gain is not: the pipeline still drains at the end of each step. To go on,
// a rank must start the warm-up forwards of step t+1 before the update of step t, which wants
//   - a schedule over steps: rows whose last w = p - 1 - r forwards belong to the next batch, after
//   a
//     first step that fills and before a last that drains (make_schedule knows one step);
//   - two versions by parity instead of a copy: step t's F and B read version t mod 2, the update
//     writes over it, so the program has two variants that differ in which name they read;
//   - an executor and trainer with two batches open: inputs and item counts of t+1 are fed before
//   the
//     loss of t is known, which is then reported a step late, and a checkpoint drains first;
//   - no norm over all stages in the update: clipping and the check for finite gradients would wait
//     for the slowest stage, so --clip-norm is refused or delayed by a step, as the reference's
//     no-flush mode skips both.
#pragma once

#include "graph/training_graph.h"

namespace trainrt {

// Adds to every trained parameter p the version before it, "p.previous", a parameter like p:
// forward and backward read that one, and the update moves p into it before it changes p.
TrainingGraph delay_weights(TrainingGraph whole);

// The name of the older version of a parameter.
std::string previous_version(const std::string& parameter);

}  // namespace trainrt
