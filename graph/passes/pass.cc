#include "graph/passes/pass.h"

#include <functional>
#include <numeric>
#include <queue>

#include "graph/op_def.h"

namespace trainrt {

std::vector<NodeId> topological_order(const Graph& graph) {
  std::vector<int> positions(static_cast<size_t>(graph.num_nodes()));
  std::iota(positions.begin(), positions.end(), 0);
  return topological_order(graph, positions);
}

std::vector<NodeId> topological_order(const Graph& graph, const std::vector<int>& positions) {
  std::vector<int> missing(static_cast<size_t>(graph.num_nodes()), 0);
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    for (const ValueId input : graph.node(id).inputs) {
      missing[static_cast<size_t>(id)] +=
          input != kNoValue && graph.value(input).producer != kNoNode ? 1 : 0;
    }
  }
  const std::vector<std::vector<NodeId>> consumers = graph.consumers();
  using Entry = std::pair<int, NodeId>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> ready;
  const auto push = [&](NodeId id) { ready.emplace(positions[static_cast<size_t>(id)], id); };
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    if (missing[static_cast<size_t>(id)] == 0) {
      push(id);
    }
  }
  std::vector<NodeId> order;
  while (!ready.empty()) {
    const NodeId id = ready.top().second;
    ready.pop();
    order.push_back(id);
    for (const ValueId output : graph.node(id).outputs) {
      if (output == kNoValue) {
        continue;
      }
      for (const NodeId consumer : consumers[static_cast<size_t>(output)]) {
        if (--missing[static_cast<size_t>(consumer)] == 0) {
          push(consumer);
        }
      }
    }
  }
  if (static_cast<int>(order.size()) != graph.num_nodes()) {
    for (NodeId id = 0; id < graph.num_nodes(); ++id) {
      TRAINRT_REQUIRE(missing[static_cast<size_t>(id)] == 0,
                      kInvalidModel,
                      "node '",
                      graph.node(id).name,
                      "' (",
                      graph.node(id).op_type,
                      ") is part of a cycle");
    }
  }
  return order;
}

std::vector<NodeId> live_nodes(const Graph& graph) {
  std::vector<bool> live(static_cast<size_t>(graph.num_nodes()), false);
  const auto mark = [&](ValueId id) {
    if (id != kNoValue && graph.value(id).producer != kNoNode) {
      live[static_cast<size_t>(graph.value(id).producer)] = true;
    }
  };
  for (const ValueId id : graph.outputs()) {
    mark(id);
  }
  for (const StateUpdate& update : graph.updates()) {
    mark(update.new_value);
  }
  std::vector<NodeId> order;
  for (NodeId id = graph.num_nodes(); id-- > 0;) {
    const OpDef* def = find_op(graph.node(id).op_type);
    if (live[static_cast<size_t>(id)] || (def != nullptr && def->effect)) {
      order.push_back(id);
      for (const ValueId input : graph.node(id).inputs) {
        mark(input);
      }
    }
  }
  return {order.rbegin(), order.rend()};
}

Graph eliminate_dead_code(const Graph& graph) {
  const std::vector<NodeId> live = live_nodes(graph);
  std::vector<bool> read(static_cast<size_t>(graph.num_values()), false);
  const auto mark = [&](ValueId id) {
    if (id != kNoValue) {
      read[static_cast<size_t>(id)] = true;
    }
  };
  for (const NodeId id : live) {
    for (const ValueId input : graph.node(id).inputs) {
      mark(input);
    }
  }
  for (const ValueId id : graph.outputs()) {
    mark(id);
  }
  for (const StateUpdate& update : graph.updates()) {
    mark(update.new_value);
  }
  // The first output stays: kernels write it whatever becomes of the others, and take its type for
  // the node's.
  std::vector<std::pair<NodeId, size_t>> dropped;
  for (const NodeId id : live) {
    const std::vector<ValueId>& outputs = graph.node(id).outputs;
    for (size_t i = 1; i < outputs.size(); ++i) {
      if (outputs[i] != kNoValue && !read[static_cast<size_t>(outputs[i])]) {
        dropped.emplace_back(id, i);
      }
    }
  }
  if (dropped.empty()) {
    return graph.subgraph(live);
  }
  Graph trimmed = graph;
  for (const auto& [id, output] : dropped) {
    trimmed.node(id).outputs[output] = kNoValue;
  }
  return trimmed.subgraph(live);
}

void replace_uses(Graph& graph, ValueId from, ValueId to) {
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    for (ValueId& input : graph.node(id).inputs) {
      input = input == from ? to : input;
    }
  }
  for (ValueId& output : graph.outputs()) {
    output = output == from ? to : output;
  }
  for (StateUpdate& update : graph.updates()) {
    update.new_value = update.new_value == from ? to : update.new_value;
  }
}

}  // namespace trainrt
