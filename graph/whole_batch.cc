#include "graph/whole_batch.h"

#include <algorithm>
#include <map>

#include "graph/base/error.h"

namespace trainrt {

namespace {

constexpr const char* kCountsSamples = "trainrt.counts_samples";

bool same_value(const Value& a, const Value& b) {
  return a.name == b.name && a.type == b.type && a.constant.defined() == b.constant.defined() &&
         (!a.constant.defined() || identical(a.constant, b.constant));
}

}  // namespace

void mark_sample_counts(Graph& graph, const Graph& other) {
  std::map<std::string, const Node*> others;
  for (const Node& node : other.nodes()) {
    others[node.name] = &node;
  }
  const auto same_input = [&](ValueId a, ValueId b) {
    return a == kNoValue || b == kNoValue ? a == b : same_value(graph.value(a), other.value(b));
  };
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    Node& node = graph.node(id);
    if (node.region != Region::kUpdate) {
      continue;
    }
    const auto found = others.find(node.name);
    if (found == others.end() || node.op_type != found->second->op_type ||
        !(node.attributes == found->second->attributes) ||
        !std::equal(node.inputs.begin(),
                    node.inputs.end(),
                    found->second->inputs.begin(),
                    found->second->inputs.end(),
                    same_input)) {
      node.attributes.set(kCountsSamples, int64_t{1});
      return;
    }
  }
}

std::string whole_batch_because(const Graph& graph) {
  for (const Node& node : graph.nodes()) {
    if (node.attributes.has(kCountsSamples)) {
      return concat("node '",
                    node.name,
                    "' (",
                    node.op_type,
                    ") of the update depends on the number of samples");
    }
  }
  for (const StateUpdate& update : graph.updates()) {
    const NodeId id = graph.value(update.new_value).producer;
    const Value& target = graph.value(update.target);
    // A running average of BatchNormalization is defined by micro-batches.
    if (id != kNoNode && target.kind != ValueKind::kGradient &&
        graph.node(id).region != Region::kUpdate && graph.node(id).op_type != "RunningAverage") {
      return concat("node '",
                    graph.node(id).name,
                    "' (",
                    graph.node(id).op_type,
                    ") makes the new contents of '",
                    target.name,
                    "' from the samples themselves, not from their gradients");
    }
  }
  return "";
}

void drop_sample_counts(Graph& graph) {
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    graph.node(id).attributes.erase(kCountsSamples);
  }
}

}  // namespace trainrt
