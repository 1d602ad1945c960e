// Activation recomputation: forward nodes run again in the backward instead of keeping what they
// made.
#pragma once

#include "graph/training_graph.h"
#include "parallel/plan.h"

namespace trainrt {

// Applies the recompute mode of every stage of the plan: `selective` runs again what is
// memory-bound (OpDef::cheap), `full` keeps only single tensors that cut the stage's forward in two
// (the inputs of blocks) and runs blocks again; the stage's recompute_runs have modes of their own,
// and its recompute_nodes, where given, are all that runs again. Clones draw the same random
// numbers and change no state, so results are equal to the bit.
TrainingGraph apply_recompute(TrainingGraph whole, const Plan& plan);

}  // namespace trainrt
