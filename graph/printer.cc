#include "graph/printer.h"

namespace trainrt {

namespace {

std::string value_string(const Graph& graph, ValueId id, bool with_type) {
  if (id == kNoValue) {
    return "_";
  }
  const Value& value = graph.value(id);
  return with_type ? value.name + ": " + type_string(value.type) : value.name;
}

std::string list_string(const Graph& graph, const std::vector<ValueId>& ids, bool with_type) {
  std::string text;
  for (const ValueId id : ids) {
    text += (text.empty() ? "" : ", ") + value_string(graph, id, with_type);
  }
  return text;
}

}  // namespace

std::string type_string(const TensorType& type) {
  return dtype_name(type.dtype) + shape_string(type.shape);
}

std::string node_string(const Graph& graph, const Node& node) {
  std::string text = list_string(graph, node.outputs, true) + " = " + node.op_type + "(" +
                     list_string(graph, node.inputs, false) + ")";
  for (const auto& [name, value] : node.attributes) {
    text += " " + name + "=" + attribute_string(value);
  }
  return text + "  # " + node.name;
}

std::string graph_string(const Graph& graph) {
  std::string text;
  for (const Value& value : graph.values()) {
    if (value.producer == kNoNode) {
      text += std::string(value_kind_name(value.kind)) + " " + value.name + ": " +
              type_string(value.type) + "\n";
    }
  }
  for (const Node& node : graph.nodes()) {
    text += std::string(region_name(node.region)) + " " + node_string(graph, node) + "\n";
  }
  text += "outputs " + list_string(graph, graph.outputs(), false) + "\n";
  for (const StateUpdate& update : graph.updates()) {
    text += "update " + graph.value(update.target).name + " <- " +
            graph.value(update.new_value).name + "\n";
  }
  return text;
}

}  // namespace trainrt
