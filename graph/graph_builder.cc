#include "graph/graph_builder.h"

#include <cmath>

#include "graph/op_def.h"

namespace trainrt {

std::vector<ValueId> GraphBuilder::node(const std::string& op_type,
                                        const std::vector<ValueId>& inputs,
                                        Attributes attributes,
                                        std::string name,
                                        std::vector<std::string> output_names) {
  Node node;
  node.name = graph_.unique_node_name(name_prefix_ + (name.empty() ? op_type : name));
  node.op_type = op_type;
  node.attributes = std::move(attributes);
  node.inputs = inputs;
  node.region = region_;
  node.source_index = source_index_;
  node.forward_node = forward_node_;
  const OpDef& def = get_op(op_type);
  TensorTypes input_types;
  std::vector<bool> present;
  for (const ValueId id : inputs) {
    present.push_back(id != kNoValue);
    input_types.push_back(id == kNoValue ? TensorType{} : type(id));
  }
  TensorTypes output_types;
  try {
    output_types = def.infer_types(OpContext(node, input_types, present, {}));
    for (const TensorType& output : output_types) {
      num_elements(output.shape);  // refuses what is no shape
    }
  } catch (Error& error) {
    std::string types;
    for (size_t i = 0; i < input_types.size(); ++i) {
      types += (i == 0 ? "" : ", ") +
               (present[i] ? dtype_name(input_types[i].dtype) + shape_string(input_types[i].shape)
                           : std::string("absent"));
    }
    error.add_context(concat("at node '", node.name, "' (", op_type, ") with inputs ", types));
    throw;
  }
  for (std::string& output_name : output_names) {
    if (!output_name.empty()) {
      output_name = graph_.unique_value_name(output_name);
    }
  }
  const NodeId id = graph_.add_node(std::move(node), output_types, std::move(output_names));
  return graph_.node(id).outputs;
}

ValueId GraphBuilder::op(const std::string& op_type,
                         const std::vector<ValueId>& inputs,
                         Attributes attributes,
                         std::string name,
                         std::string output_name) {
  return node(op_type, inputs, std::move(attributes), std::move(name), {std::move(output_name)})
      .at(0);
}

ValueId GraphBuilder::constant(Tensor data, std::string name) {
  return graph_.add_constant(
      graph_.unique_value_name(name_prefix_ + (name.empty() ? "constant" : name)), std::move(data));
}

ValueId GraphBuilder::scalar(double value, DType dtype) {
  const std::string name =
      "scalar." + std::string(dtype_name(dtype)) + "." + attribute_string(value);
  if (const std::optional<ValueId> existing = graph_.find_value(name)) {
    return *existing;
  }
  return graph_.add_constant(name, Tensor::scalar<double>(value).cast(dtype));
}

ValueId GraphBuilder::fill(double value, TensorType type) {
  return op(
      "Fill",
      {},
      {{"value", value}, {"shape", type.shape}, {"dtype", std::string(dtype_name(type.dtype))}});
}

ValueId GraphBuilder::zeros_like(ValueId id) {
  return fill(0, type(id));
}

ValueId GraphBuilder::mul(ValueId a, double factor) {
  return mul(a, scalar(factor, dtype(a)));
}

ValueId GraphBuilder::add(ValueId a, double term) {
  return add(a, scalar(term, dtype(a)));
}

ValueId GraphBuilder::matmul(ValueId a, ValueId b, bool trans_a, bool trans_b) {
  Attributes attributes;
  if (trans_a) {
    attributes.set("trans_a", int64_t{1});
  }
  if (trans_b) {
    attributes.set("trans_b", int64_t{1});
  }
  return op("MatMul", {a, b}, std::move(attributes));
}

ValueId GraphBuilder::reduce_sum(ValueId a, std::vector<int64_t> axes, bool keepdims) {
  return op("ReduceSum", {a}, {{"axes", std::move(axes)}, {"keepdims", int64_t{keepdims}}});
}

ValueId GraphBuilder::reshape(ValueId a, Shape new_shape) {
  return shape(a) == new_shape ? a : op("Reshape", {a}, {{"shape", std::move(new_shape)}});
}

ValueId GraphBuilder::transpose(ValueId a, std::vector<int64_t> permutation) {
  return op("Transpose", {a}, {{"perm", std::move(permutation)}});
}

ValueId GraphBuilder::expand(ValueId a, Shape new_shape) {
  return shape(a) == new_shape ? a : op("Expand", {a}, {{"shape", std::move(new_shape)}});
}

ValueId GraphBuilder::cast(ValueId a, DType to) {
  return dtype(a) == to ? a : op("Cast", {a}, {{"to", std::string(dtype_name(to))}});
}

ValueId GraphBuilder::reduce_to(ValueId a, const Shape& shape_to) {
  // Copies: both may be shapes of values of this graph, which move when a node is appended.
  const Shape target = shape_to;
  const Shape from = shape(a);
  if (from == target) {
    return a;
  }
  const size_t offset = from.size() - target.size();
  std::vector<int64_t> axes;
  for (size_t d = 0; d < from.size(); ++d) {
    if (d < offset || (target[d - offset] == 1 && from[d] != 1)) {
      axes.push_back(static_cast<int64_t>(d));
    }
  }
  return reshape(axes.empty() ? a : reduce_sum(a, axes, /*keepdims=*/true), target);
}

}  // namespace trainrt
