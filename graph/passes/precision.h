// --precision as a graph pass over the forward graph, before autodiff.
#pragma once

#include <string>

#include "graph/graph.h"

namespace trainrt {

// Every float32 value becomes float64: inputs, parameters, state, constants and what is computed
// from them, with the same names. For checks against float64 references; initial values are
// converted exactly.
Graph to_float64(const Graph& graph);

// Applies one of CONTRACT's precisions. "fp32": the graph as it is. "fp64": to_float64(). Throws
// kInvalidArgument for a name that is none, kUnsupported for one that this build cannot run.
Graph apply_precision(const Graph& graph, const std::string& precision);

}  // namespace trainrt
