// A Graph as text, one node per line, for people, tests and debugging.
#pragma once

#include <string>

#include "graph/graph.h"

namespace trainrt {

std::string type_string(const TensorType& type);  // "float32[2, 3]"
std::string node_string(const Graph& graph, const Node& node);
std::string graph_string(const Graph& graph);

}  // namespace trainrt
