// Steps that cannot be cut into micro-batches or over data ranks, since something of their update
// (that of a training_info) is no function of states and of gradients, which add up.
#pragma once

#include <string>

#include "graph/graph.h"

namespace trainrt {

// Marks in the update of `graph` the first node that is another one in `other`, which is the same
// training graph at another micro-batch size: the number of samples is a constant to it.
void mark_sample_counts(Graph& graph, const Graph& other);

// Why the step cannot be cut, as the beginning of a sentence; "": it can be.
std::string whole_batch_because(const Graph& graph);

// For graphs whose step is not cut: without the marks, which are no attributes of operators.
void drop_sample_counts(Graph& graph);

}  // namespace trainrt
