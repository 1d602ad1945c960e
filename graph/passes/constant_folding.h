// Nodes whose operands are known become constants. Weights are never read for it: a constant that
// has only a TensorSource (a parameter candidate, a frozen weight, an external file) is not folded.
#pragma once

#include <optional>

#include "graph/graph.h"

namespace trainrt {

struct FoldLimits {
  // Elements of a folded result. Expand and Fill, which only make a tensor larger, are worth it for
  // small results alone: their nodes cost less memory than the constants would.
  int64_t elements = 4 << 20;
  int64_t enlarged_elements = 64 << 10;
};

// True if `node` can be computed now: deterministic, without effect, all inputs known and all
// results within the limits.
bool is_foldable(const Graph& graph, const Node& node, const FoldLimits& limits = {});

// Computes the foldable node and adds its outputs as constants, named after them. Returns one id
// per output (kNoValue where absent). The node itself stays, without readers of its own.
std::vector<ValueId> fold_node(Graph& graph, NodeId id);

// The contents of `value` when everything it is computed from is known, weights included, and each
// tensor on the way is within the limits: for operands that an operator needs as a number.
std::optional<Tensor> known_contents(const Graph& graph,
                                     ValueId value,
                                     const FoldLimits& limits = {});

// The graph with every foldable node replaced by constants.
Graph fold_constants(const Graph& graph);

}  // namespace trainrt
