#include "graph/passes/precision.h"

#include "graph/op_def.h"

namespace trainrt {

namespace {

DType widen(DType dtype) {
  return dtype == DType::kFloat32 ? DType::kFloat64 : dtype;
}

// Attributes that name an element type or hold float data follow the values.
void widen_attributes(Node& node) {
  for (const char* name : {"to", "dtype"}) {
    if (node.attributes.has(name) && node.attributes.get_string(name) == "float32") {
      node.attributes.set(name, std::string("float64"));
    }
  }
}

Value widen_value(Value value) {
  if (value.type.dtype != DType::kFloat32) {
    return value;
  }
  value.type.dtype = DType::kFloat64;
  if (value.constant.defined()) {
    value.constant = value.constant.cast(DType::kFloat64);
  }
  if (value.source.load) {
    value.source.load = [load = value.source.load] { return load().cast(DType::kFloat64); };
  }
  return value;
}

}  // namespace

Graph to_float64(const Graph& graph) {
  Graph wide;
  std::vector<ValueId> map(static_cast<size_t>(graph.num_values()), kNoValue);
  for (ValueId id = 0; id < graph.num_values(); ++id) {
    if (graph.value(id).producer == kNoNode) {
      map[static_cast<size_t>(id)] = wide.add_value(widen_value(graph.value(id)));
    }
  }
  for (const Node& original : graph.nodes()) {
    Node node = original;
    widen_attributes(node);
    for (ValueId& input : node.inputs) {
      input = input == kNoValue ? kNoValue : map[static_cast<size_t>(input)];
    }
    TensorTypes types;
    std::vector<std::string> names;
    for (const ValueId output : original.outputs) {
      TensorType type = output == kNoValue ? TensorType{} : graph.value(output).type;
      type.dtype = widen(type.dtype);
      types.push_back(std::move(type));
      names.push_back(output == kNoValue ? "" : graph.value(output).name);
    }
    const NodeId id = wide.add_node(std::move(node), types, std::move(names));
    for (size_t i = 0; i < original.outputs.size(); ++i) {
      if (original.outputs[i] == kNoValue) {
        wide.node(id).outputs[i] = kNoValue;
      } else {
        map[static_cast<size_t>(original.outputs[i])] = wide.node(id).outputs[i];
      }
    }
  }
  for (const ValueId id : graph.outputs()) {
    wide.outputs().push_back(map[static_cast<size_t>(id)]);
  }
  for (const StateUpdate& update : graph.updates()) {
    wide.updates().push_back(
        {map[static_cast<size_t>(update.target)], map[static_cast<size_t>(update.new_value)]});
  }
  return wide;
}

Graph apply_precision(const Graph& graph, const std::string& precision) {
  if (precision == "fp32") {
    return graph;
  }
  if (precision == "fp64") {
    return to_float64(graph);
  }
  for (const char* known : {"auto", "tf32", "bf16", "fp16"}) {
    TRAINRT_REQUIRE(precision != known,
                    kUnsupported,
                    "--precision ",
                    precision,
                    " is not available on the CPU in this build; use fp32 or fp64");
  }
  TRAINRT_FAIL(kInvalidArgument,
               "--precision '",
               precision,
               "' is none",
               did_you_mean(precision, {"auto", "fp64", "fp32", "tf32", "bf16", "fp16"}),
               " (auto, fp64, fp32, tf32, bf16, fp16)");
}

}  // namespace trainrt
