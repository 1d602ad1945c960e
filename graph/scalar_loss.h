// A loss that the model computes itself, down to a scalar: what of it is told by the samples.
#pragma once

#include <string>

#include "graph/graph.h"

namespace trainrt {

struct ScalarLoss {
  // A sum over samples, times numbers that do not depend on theirs, which is divided by their
  // number; anything else is taken for a mean, that is weighted by samples where a step is cut.
  bool sums_samples = false;
  // What of it depends on how a step is cut, in words for the user; "" for a mean over samples.
  std::string warning;
};

// The sum behind a scalar that is nothing but a sum, of losses of items in double precision where
// there are such; kNoValue for any other scalar.
ValueId sum_behind(const Graph& graph, ValueId scalar);

// `loss`: a float scalar of a graph of more than one sample per micro-batch; with one sample, sums
// over samples cannot be told from others. `doubled`: the same model at twice as many samples,
// which tells numbers of the model from numbers of samples (sum / 6.0); null: the model has no
// other size.
ScalarLoss describe_scalar_loss(const Graph& graph, ValueId loss, const Graph* doubled = nullptr);

}  // namespace trainrt
