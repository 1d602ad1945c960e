#include "graph/verifier.h"

#include "graph/op_def.h"

namespace trainrt {

namespace {

void verify_types(const Graph& graph, const Node& node, const std::string& where) {
  const OpContext op(graph, node);
  const OpDef* def = find_op(node.op_type);
  TRAINRT_CHECK(
      def != nullptr, where, ": node '", node.name, "' has unknown operator '", node.op_type, "'");
  const TensorTypes inferred = def->infer_types(op);
  TRAINRT_CHECK(inferred.size() >= node.outputs.size(),
                where,
                ": node '",
                node.name,
                "' has ",
                node.outputs.size(),
                " outputs, its operator ",
                inferred.size());
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    if (node.outputs[i] == kNoValue) {
      continue;
    }
    const TensorType& actual = graph.value(node.outputs[i]).type;
    TRAINRT_CHECK(actual == inferred[i],
                  where,
                  ": output ",
                  i,
                  " of node '",
                  node.name,
                  "' (",
                  node.op_type,
                  ") is ",
                  dtype_name(actual.dtype),
                  shape_string(actual.shape),
                  ", inferred ",
                  dtype_name(inferred[i].dtype),
                  shape_string(inferred[i].shape));
  }
}

}  // namespace

void verify(const Graph& graph, const std::string& where) {
  std::vector<bool> defined(static_cast<size_t>(graph.num_values()), false);
  for (ValueId id = 0; id < graph.num_values(); ++id) {
    const Value& value = graph.value(id);
    TRAINRT_CHECK(!value.name.empty(), where, ": a value has no name");
    TRAINRT_CHECK((value.producer == kNoNode) == (value.kind != ValueKind::kIntermediate),
                  where,
                  ": value '",
                  value.name,
                  "' is a ",
                  value_kind_name(value.kind),
                  value.producer == kNoNode ? " without" : " with",
                  " a producer");
    defined[static_cast<size_t>(id)] = value.producer == kNoNode;
  }
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    const Node& node = graph.node(id);
    for (const ValueId input : node.inputs) {
      TRAINRT_CHECK(input == kNoValue || defined.at(static_cast<size_t>(input)),
                    where,
                    ": node '",
                    node.name,
                    "' reads '",
                    graph.value(input).name,
                    "' before it is produced");
    }
    for (size_t i = 0; i < node.outputs.size(); ++i) {
      const ValueId output = node.outputs[i];
      if (output == kNoValue) {
        continue;
      }
      const Value& value = graph.value(output);
      TRAINRT_CHECK(value.producer == id && value.output_index == static_cast<int>(i),
                    where,
                    ": value '",
                    value.name,
                    "' does not know its producer '",
                    node.name,
                    "'");
      defined[static_cast<size_t>(output)] = true;
    }
    verify_types(graph, node, where);
  }
  std::vector<bool> updated(static_cast<size_t>(graph.num_values()), false);
  for (const StateUpdate& update : graph.updates()) {
    TRAINRT_CHECK(!updated.at(static_cast<size_t>(update.target)),
                  where,
                  ": '",
                  graph.value(update.target).name,
                  "' is updated twice");
    updated[static_cast<size_t>(update.target)] = true;
  }
}

}  // namespace trainrt
