// --reduction exact: gradients are summed along one tree over the step's logical shards
// (parallel/reduction_tree), whoever has which of them.
#pragma once

#include "graph/training_graph.h"
#include "parallel/micro_batches.h"

namespace trainrt {

// `lowered`: one data rank's graph, in which every gradient is accumulated and, with several data
// ranks, summed over them right behind its accumulation (SpmdOptions::sum_at_once). `ranks` has the
// micro-batches of all data ranks. Accumulators become stacks of subtrees; the sum over data ranks
// becomes an exchange of subtrees (all-gather, or all-to-all where ZeRO wants a piece) and a
// TreeSum.
TrainingGraph exact_reduction(TrainingGraph lowered,
                              const std::vector<std::vector<MicroBatchCut>>& ranks,
                              int64_t num_shards,
                              int data_rank);

}  // namespace trainrt
