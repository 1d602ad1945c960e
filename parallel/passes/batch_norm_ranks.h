// BatchNorm over several ranks. Both passes take one data rank's graph.
#pragma once

#include "graph/training_graph.h"
#include "parallel/micro_batches.h"

namespace trainrt {

// Local statistics: every micro-batch normalizes by its own, and the running ones are the fold of
// all micro-batches of the step, in the order of the samples, on every rank. The forward notes what
// a micro-batch found, the update gathers the notes of all data ranks and folds them; where steps
// may be skipped, as those of float16, only if the step is not. Throws kInfeasiblePlan for state
// that is changed in the forward by anything but a running average.
TrainingGraph fold_running_averages(TrainingGraph lowered,
                                    const std::vector<std::vector<MicroBatchCut>>& ranks,
                                    int data_rank,
                                    bool may_skip);

// Whether a BatchNormalization is used more than once (in siamese nets): its running averages take
// in one use after the other. Uses in several stages of a pipeline are folded as those of several
// data ranks are: the first stage does not wait for the last to end a micro-batch.
bool shares_running_averages(const Graph& graph);

// Synchronised statistics: micro-batch i of all data ranks is normalized as one batch of
// `num_samples` samples, of which this rank has `own_samples`. The sums behind mean and variance
// and their gradients are added over data ranks; every rank then updates the running statistics
// alike.
TrainingGraph sync_batch_norm(TrainingGraph lowered, int64_t own_samples, int64_t num_samples);

}  // namespace trainrt
