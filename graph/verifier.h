// Checks the invariants of graph/graph.h; run after every pass.
#pragma once

#include "graph/graph.h"

namespace trainrt {

// Throws kInternal naming `where`, the node or value, and the broken invariant.
void verify(const Graph& graph, const std::string& where);

}  // namespace trainrt
