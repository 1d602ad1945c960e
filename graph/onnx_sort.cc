// Kahn's algorithm with a heap of positions, on protobuf nodes. What a node's subgraphs read from
// outside counts as read by the node.
#include <functional>
#include <queue>
#include <unordered_map>
#include <unordered_set>

#include "graph/base/error.h"
#include "graph/onnx_validate.h"

namespace trainrt {

namespace {

using Nodes = google::protobuf::RepeatedPtrField<onnx::NodeProto>;

bool sort_graph(onnx::GraphProto& graph);

void collect_names(const onnx::GraphProto& graph, std::vector<std::string>& names);

void collect_names(const onnx::NodeProto& node, std::vector<std::string>& names) {
  names.insert(names.end(), node.input().begin(), node.input().end());
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    if (attribute.has_g()) {
      collect_names(attribute.g(), names);
    }
    for (const onnx::GraphProto& graph : attribute.graphs()) {
      collect_names(graph, names);
    }
  }
}

// Every name that a subgraph reads and does not define itself.
void collect_names(const onnx::GraphProto& graph, std::vector<std::string>& names) {
  std::vector<std::string> read;
  std::unordered_set<std::string> own;
  for (const onnx::ValueInfoProto& input : graph.input()) {
    own.insert(input.name());
  }
  for (const onnx::TensorProto& initializer : graph.initializer()) {
    own.insert(initializer.name());
  }
  for (const onnx::NodeProto& node : graph.node()) {
    collect_names(node, read);
    own.insert(node.output().begin(), node.output().end());
  }
  for (const onnx::ValueInfoProto& output : graph.output()) {
    read.push_back(output.name());
  }
  for (std::string& name : read) {
    if (own.count(name) == 0) {
      names.push_back(std::move(name));
    }
  }
}

bool sort_subgraphs(Nodes& nodes) {
  bool moved = false;
  for (onnx::NodeProto& node : nodes) {
    for (onnx::AttributeProto& attribute : *node.mutable_attribute()) {
      if (attribute.has_g()) {
        moved |= sort_graph(*attribute.mutable_g());
      }
      for (onnx::GraphProto& graph : *attribute.mutable_graphs()) {
        moved |= sort_graph(graph);
      }
    }
  }
  return moved;
}

void fail_on_cycle(const Nodes& nodes, const std::vector<int>& missing) {
  std::string names;
  int shown = 0;
  for (int i = 0; i < nodes.size(); ++i) {
    if (missing[static_cast<size_t>(i)] > 0 && shown++ < 8) {
      names +=
          concat(names.empty() ? "" : ", ", "'", nodes[i].name(), "' (", nodes[i].op_type(), ")");
    }
  }
  TRAINRT_FAIL(
      kInvalidModel, "the model's nodes form a cycle: ", names, " wait for each other's outputs");
}

bool sort_nodes(Nodes& nodes) {
  bool moved = sort_subgraphs(nodes);
  std::unordered_map<std::string, int> producer;
  for (int i = 0; i < nodes.size(); ++i) {
    for (const std::string& output : nodes[i].output()) {
      if (!output.empty()) {
        producer.emplace(output, i);
      }
    }
  }
  std::vector<int> missing(static_cast<size_t>(nodes.size()), 0);
  std::vector<std::vector<int>> readers(static_cast<size_t>(nodes.size()));
  for (int i = 0; i < nodes.size(); ++i) {
    std::vector<std::string> names;
    collect_names(nodes[i], names);
    std::unordered_set<int> sources;
    for (const std::string& name : names) {
      const auto it = producer.find(name);
      if (it != producer.end() && sources.insert(it->second).second) {
        readers[static_cast<size_t>(it->second)].push_back(i);
        ++missing[static_cast<size_t>(i)];
      }
    }
  }
  std::priority_queue<int, std::vector<int>, std::greater<>> ready;
  for (int i = 0; i < nodes.size(); ++i) {
    if (missing[static_cast<size_t>(i)] == 0) {
      ready.push(i);
    }
  }
  std::vector<int> order;
  while (!ready.empty()) {
    const int i = ready.top();
    ready.pop();
    moved |= i != static_cast<int>(order.size());
    order.push_back(i);
    for (const int reader : readers[static_cast<size_t>(i)]) {
      if (--missing[static_cast<size_t>(reader)] == 0) {
        ready.push(reader);
      }
    }
  }
  if (static_cast<int>(order.size()) != nodes.size()) {
    fail_on_cycle(nodes, missing);
  }
  if (moved) {
    Nodes sorted;
    for (const int i : order) {
      sorted.Add()->Swap(nodes.Mutable(i));
    }
    nodes.Swap(&sorted);
  }
  return moved;
}

bool sort_graph(onnx::GraphProto& graph) {
  return sort_nodes(*graph.mutable_node());
}

}  // namespace

bool sort_nodes(onnx::ModelProto& model) {
  bool moved = sort_graph(*model.mutable_graph());
  for (onnx::FunctionProto& function : *model.mutable_functions()) {
    moved |= sort_nodes(*function.mutable_node());
  }
  for (onnx::TrainingInfoProto& info : *model.mutable_training_info()) {
    moved |= sort_graph(*info.mutable_algorithm());
    moved |= sort_graph(*info.mutable_initialization());
  }
  return moved;
}

}  // namespace trainrt
