// A small training graph with repeated layers, for planner tests: residual blocks of two products.
#pragma once

#include <vector>

#include "graph/training_graph.h"

namespace trainrt::testing {

// `layers` x (x + relu(x W1) W2) on [batch, seq, hidden], then logits over `classes`.
TrainingGraph layered_model(
    int64_t batch, int layers, int64_t seq, int64_t hidden, int64_t ffn, int64_t classes);

// The same with a width for each layer.
TrainingGraph layered_model(
    int64_t batch, int64_t seq, int64_t hidden, const std::vector<int64_t>& ffn, int64_t classes);

}  // namespace trainrt::testing
