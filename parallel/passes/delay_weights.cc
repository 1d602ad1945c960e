#include "parallel/passes/delay_weights.h"

#include "graph/graph_builder.h"
#include "parallel/passes/node_inserter.h"

namespace trainrt {

std::string previous_version(const std::string& parameter) {
  return parameter + ".previous";
}

TrainingGraph delay_weights(TrainingGraph whole) {
  Graph& graph = whole.graph;
  std::vector<ValueId> older(static_cast<size_t>(graph.num_values()), kNoValue);
  for (const ValueId id : graph.values_of_kind(ValueKind::kParameter)) {
    Value copy = graph.value(id);
    copy.name = graph.unique_value_name(previous_version(copy.name));
    older[static_cast<size_t>(id)] = graph.add_value(std::move(copy));
  }
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    Node& node = graph.node(id);
    if (node.region == Region::kUpdate) {
      continue;
    }
    for (ValueId& input : node.inputs) {
      if (input != kNoValue && older[static_cast<size_t>(input)] != kNoValue) {
        input = older[static_cast<size_t>(input)];
      }
    }
  }
  GraphBuilder builder(graph);
  builder.set_region(Region::kUpdate);
  std::vector<NodeId> order, moves;
  const int num_nodes = graph.num_nodes();
  for (size_t id = 0; id < older.size(); ++id) {
    if (older[id] != kNoValue) {
      const ValueId moved = builder.op("Assign",
                                       {older[id], static_cast<ValueId>(id)},
                                       {},
                                       graph.value(older[id]).name + "/assign");
      graph.updates().push_back({older[id], moved});
      moves.push_back(graph.value(moved).producer);
    }
  }
  // The moves stand before the update, so that both versions are placed alike.
  for (NodeId id = 0; id < num_nodes; ++id) {
    if (graph.node(id).region == Region::kUpdate && !moves.empty()) {
      order.insert(order.end(), moves.begin(), moves.end());
      moves.clear();
    }
    order.push_back(id);
  }
  keep_nodes(whole, order);
  return whole;
}

}  // namespace trainrt
