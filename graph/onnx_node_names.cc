// The first node of a name keeps it; the others are called by their name and their first output,
// which no two nodes of a graph share. A graph and its subgraphs have their names in common.
#include <unordered_set>

#include "graph/base/error.h"
#include "graph/onnx_validate.h"

namespace trainrt {

namespace {

using Nodes = google::protobuf::RepeatedPtrField<onnx::NodeProto>;

void name_apart(Nodes& nodes, std::unordered_set<std::string>& taken) {
  for (onnx::NodeProto& node : nodes) {
    if (!taken.insert(node_name(node)).second) {
      const std::string stem =
          concat(node_name(node), ":", node.output_size() > 0 ? node.output(0) : std::string());
      std::string name = stem;
      for (int number = 2; !taken.insert(name).second; ++number) {
        name = concat(stem, "_", number);
      }
      node.set_name(name);
    }
    for (onnx::AttributeProto& attribute : *node.mutable_attribute()) {
      if (attribute.has_g()) {
        name_apart(*attribute.mutable_g()->mutable_node(), taken);
      }
      for (onnx::GraphProto& graph : *attribute.mutable_graphs()) {
        name_apart(*graph.mutable_node(), taken);
      }
    }
  }
}

}  // namespace

std::string node_name(const onnx::NodeProto& node) {
  return !node.name().empty()
             ? node.name()
             : concat(node.op_type(), ":", node.output_size() > 0 ? node.output(0) : std::string());
}

void name_nodes_apart(onnx::ModelProto& model) {
  std::unordered_set<std::string> step;
  name_apart(*model.mutable_graph()->mutable_node(), step);
  for (onnx::FunctionProto& function : *model.mutable_functions()) {
    std::unordered_set<std::string> own;
    name_apart(*function.mutable_node(), own);
  }
  for (onnx::TrainingInfoProto& info : *model.mutable_training_info()) {
    name_apart(*info.mutable_algorithm()->mutable_node(), step);
    std::unordered_set<std::string> own;
    name_apart(*info.mutable_initialization()->mutable_node(), own);
  }
}

}  // namespace trainrt
