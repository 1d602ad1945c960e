// The loss as nodes: from a graph with outputs and a LossSpec to the sum of item losses, the number
// of items, and for classes the number of correct ones (see graph/training_graph.h for the rule).
#pragma once

#include "graph/graph.h"
#include "graph/training_graph.h"

namespace trainrt {

struct LossValues {
  ValueId loss_sum = kNoValue;    // float64 scalar, Region::kForward
  ValueId item_count = kNoValue;  // float64 scalar, Region::kCount
  ValueId correct = kNoValue;     // float64 scalar, Region::kForward
};

// Appends the loss to `graph`; `spec` is resolved. The labels become a graph input unless the graph
// has one of that name. `count_correct`: also emit LossValues::correct where labels are classes.
LossValues build_loss(Graph& graph, const LossSpec& spec, bool count_correct);

// The same for a float scalar of the graph: a MeanLoss is taken apart into sum and count, anything
// else that is no sum over samples (ScalarLoss::sums_samples) is weighted by them.
LossValues loss_of_scalar(Graph& graph, ValueId scalar, bool sums_samples);

// Samples per micro-batch: the batch dim of the first input that has one; 1 when none has.
int64_t micro_batch_size(const Graph& graph);

}  // namespace trainrt
