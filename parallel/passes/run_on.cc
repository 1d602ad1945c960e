#include "parallel/passes/run_on.h"

#include <algorithm>

#include "parallel/passes/batch_norm_ranks.h"

namespace trainrt {

namespace {

constexpr const char* kScaleOp = "ClipScale";

}  // namespace

std::string reason_to_drain(const Plan& plan, const Graph& graph) {
  if (plan.precision == "fp16") {
    return "--precision fp16 asks all stages whether the gradient has overflowed";
  }
  for (const Node& node : graph.nodes()) {
    if (node.op_type == kScaleOp && node.attributes.get_float("clip_norm", 0) > 0) {
      return "--clip-norm scales every stage's gradient by the norm of all";
    }
    if (plan.data_parallel > 1 && node.op_type == "RunningAverage") {
      return "the running averages of BatchNorm are gathered from all data ranks";
    }
  }
  if (shares_running_averages(graph)) {
    return "the running averages of a BatchNorm that is used twice are folded after the last stage";
  }
  // Unlike weights, of which a version is put aside, such a state has one.
  const std::vector<std::vector<NodeId>> consumers = graph.consumers();
  for (const StateUpdate& update : graph.updates()) {
    const NodeId from = graph.value(update.new_value).producer;
    if (graph.value(update.target).kind != ValueKind::kState || from == kNoNode ||
        graph.node(from).region != Region::kUpdate) {
      continue;
    }
    for (const NodeId reader : consumers[static_cast<size_t>(update.target)]) {
      if (graph.node(reader).region != Region::kUpdate) {
        return concat("node '",
                      graph.node(reader).name,
                      "' reads '",
                      graph.value(update.target).name,
                      "' as the update of the step before has left it");
      }
    }
  }
  return "";
}

bool runs_on(const Plan& plan, const Graph& graph) {
  const bool updates = std::any_of(graph.nodes().begin(),
                                   graph.nodes().end(),
                                   [](const Node& node) { return node.region == Region::kUpdate; });
  return goes_on(plan.schedule) && plan.pipeline_parallel > 1 && updates &&
         reason_to_drain(plan, graph).empty();
}

TrainingGraph update_without_norm(TrainingGraph whole) {
  Graph& graph = whole.graph;
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    Node& node = graph.node(id);
    if (node.op_type == kScaleOp) {
      const TensorType& scale = graph.value(node.outputs[0]).type;
      node.op_type = "Cast";
      node.inputs = {node.inputs[1]};
      node.attributes = {{"to", std::string(dtype_name(scale.dtype))}};
    }
  }
  return whole;
}

}  // namespace trainrt
