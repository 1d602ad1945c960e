// Small whole-graph transformations that everybody needs. Each returns a new graph and leaves
// names.
#pragma once

#include <vector>

#include "graph/graph.h"

namespace trainrt {

// Node ids in a topological order that keeps the present order wherever dependencies allow
// (Kahn's algorithm with a heap of positions). Throws kInvalidModel naming a node on a cycle.
std::vector<NodeId> topological_order(const Graph& graph);
// The same with a position of one's own for every node (fused nodes stand where their root stood).
std::vector<NodeId> topological_order(const Graph& graph, const std::vector<int>& positions);

// The nodes on which outputs, state updates or operators with effects depend, in order.
std::vector<NodeId> live_nodes(const Graph& graph);

// Removes dead nodes and turns outputs that nobody reads into kNoValue where the operator has more
// than one output.
Graph eliminate_dead_code(const Graph& graph);

// Makes every reader (nodes, outputs, updates) of `from` read `to`.
void replace_uses(Graph& graph, ValueId from, ValueId to);

}  // namespace trainrt
