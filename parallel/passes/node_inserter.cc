#include "parallel/passes/node_inserter.h"

#include <algorithm>

#include "graph/graph_builder.h"
#include "parallel/program.h"

namespace trainrt {

NodeInserter::NodeInserter(TrainingGraph source)
    : result_(std::move(source)), num_source_nodes_(result_.graph.num_nodes()) {
  for (NodeId id = 0; id < num_source_nodes_; ++id) {
    positions_.emplace_back(id, 0);
  }
  dropped_.resize(positions_.size(), false);
}

ValueId NodeInserter::after(NodeId anchor,
                            Region region,
                            const std::string& op_type,
                            const std::vector<ValueId>& inputs,
                            Attributes attributes,
                            const std::string& name) {
  const Node& like = graph().node(anchor);
  GraphBuilder builder(graph());
  builder.set_region(region);
  builder.set_source_index(like.source_index);
  builder.set_forward_node(like.forward_node);
  const std::vector<ValueId> outputs = builder.node(op_type, inputs, std::move(attributes), name);
  positions_.emplace_back(anchor, static_cast<int>(positions_.size()));
  dropped_.push_back(false);
  return outputs.empty() ? kNoValue : outputs[0];
}

TrainingGraph NodeInserter::finish() {
  std::vector<NodeId> keep;
  for (NodeId id = 0; id < graph().num_nodes(); ++id) {
    if (!dropped_[static_cast<size_t>(id)]) {
      keep.push_back(id);
    }
  }
  std::stable_sort(keep.begin(), keep.end(), [&](NodeId a, NodeId b) {
    return positions_[static_cast<size_t>(a)] < positions_[static_cast<size_t>(b)];
  });
  keep_nodes(result_, keep);
  return std::move(result_);
}

void keep_nodes(TrainingGraph& training, const std::vector<NodeId>& keep, bool drop_unused) {
  std::vector<ValueId> map;
  training.graph = training.graph.subgraph(keep, &map, drop_unused);
  for (ValueId* id :
       {&training.loss_sum, &training.item_count, &training.grad_norm, &training.correct}) {
    *id = *id == kNoValue ? kNoValue : map[static_cast<size_t>(*id)];
  }
}

ValueId micro_batch_input(Graph& graph) {
  if (const std::optional<ValueId> existing = graph.find_value(kMicroBatchInput)) {
    return *existing;
  }
  return graph.add_input(kMicroBatchInput, {DType::kInt64, {}});
}

}  // namespace trainrt
