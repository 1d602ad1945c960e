// Activations that cost next to nothing to make again are not kept for the backward.
//
// A normalised and rectified convolution result, say, is read by the next convolution's weight
// gradient only, and everything it is made from is kept anyhow. Making it a second time is one
// pass over memory; keeping it would hold a third of a residual network's activations for the whole
// step. Unlike `--recompute` this runs no operator again that computes, and it is always on.
#pragma once

#include "graph/graph.h"

namespace trainrt {

// A training graph in which such nodes stand a second time, named "<name>/again", right before the
// first backward node that reads their result. The same bits as without.
Graph rematerialize(Graph graph);

// What is worth it depends on the micro-batch's size. Ranks that run different sizes beside each
// other, and communicate for what is made again (parameters that ZeRO-3 gathers), need one answer:
// `graph`, rematerialized or not, with those nodes a second time that `example` has so.
Graph rematerialize_like(Graph graph, const Graph& example);

}  // namespace trainrt
