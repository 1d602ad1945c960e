// A Graph of plain ONNX operators (models/ build them) as an ONNX file. Shape-like operands stand
// in such a graph as ONNX wants them, as constant inputs, so this is a change of container:
// parameters, state and constants become initializers, but tensors of constant floats, which nobody
// is to take for weights, Constant nodes; attributes keep their types, and the batch dim of inputs
// and outputs is written as a symbol.
#include <algorithm>

#include "graph/base/log.h"
#include "graph/onnx_export.h"
#include "graph/onnx_tensor.h"
#include "graph/onnx_write_file.h"

namespace trainrt {

namespace {

// What a file may say to every runtime of the last years: IR 8 goes with opset 17.
constexpr int kIrVersion = 8;

void set_attribute(onnx::AttributeProto& proto,
                   const std::string& name,
                   const AttributeValue& value) {
  proto.set_name(name);
  if (const auto* i = std::get_if<int64_t>(&value)) {
    proto.set_type(onnx::AttributeProto::INT);
    proto.set_i(*i);
  } else if (const auto* f = std::get_if<double>(&value)) {
    proto.set_type(onnx::AttributeProto::FLOAT);
    proto.set_f(static_cast<float>(*f));
  } else if (const auto* s = std::get_if<std::string>(&value)) {
    proto.set_type(onnx::AttributeProto::STRING);
    proto.set_s(*s);
  } else if (const auto* ints = std::get_if<std::vector<int64_t>>(&value)) {
    proto.set_type(onnx::AttributeProto::INTS);
    proto.mutable_ints()->Add(ints->begin(), ints->end());
  } else if (const auto* floats = std::get_if<std::vector<double>>(&value)) {
    proto.set_type(onnx::AttributeProto::FLOATS);
    for (const double item : *floats) {
      proto.add_floats(static_cast<float>(item));
    }
  } else if (const auto* strings = std::get_if<std::vector<std::string>>(&value)) {
    proto.set_type(onnx::AttributeProto::STRINGS);
    for (const std::string& item : *strings) {
      proto.add_strings(item);
    }
  } else {
    proto.set_type(onnx::AttributeProto::TENSOR);
    fill_tensor(*proto.mutable_t(), std::get<Tensor>(value));
  }
}

void write_value_info(onnx::ValueInfoProto& info,
                      const Value& value,
                      int batch_axis,
                      const ExportOptions& options) {
  info.set_name(value.name);
  onnx::TypeProto::Tensor* tensor = info.mutable_type()->mutable_tensor_type();
  tensor->set_elem_type(dtype_to_onnx(value.type.dtype));
  onnx::TensorShapeProto* shape = tensor->mutable_shape();
  for (size_t axis = 0; axis < value.type.shape.size(); ++axis) {
    onnx::TensorShapeProto::Dimension* dim = shape->add_dim();
    if (static_cast<int>(axis) == batch_axis) {
      dim->set_dim_param(options.batch_symbol);
    } else if (axis == 1 && !options.sequence_symbol.empty()) {
      dim->set_dim_param(options.sequence_symbol);
    } else {
      dim->set_dim_value(value.type.shape[axis]);
    }
  }
}

void write_node(onnx::NodeProto& proto, const Graph& graph, const Node& node) {
  proto.set_name(node.name);
  proto.set_op_type(node.op_type);
  const auto name = [&](ValueId id) { return id == kNoValue ? "" : graph.value(id).name; };
  for (const ValueId id : node.inputs) {
    proto.add_input(name(id));
  }
  for (const ValueId id : node.outputs) {
    proto.add_output(name(id));
  }
  for (const auto& [key, value] : node.attributes) {
    set_attribute(*proto.add_attribute(), key, value);
  }
}

bool is_weight(const Value& value) {
  return value.producer == kNoNode && value.kind != ValueKind::kInput;
}

bool is_constant_node(const Value& value) {
  return is_weight(value) && value.kind == ValueKind::kConstant && is_floating(value.type.dtype) &&
         !value.type.shape.empty();
}

int64_t weight_bytes(const Graph& graph) {
  int64_t bytes = 0;
  for (const Value& value : graph.values()) {
    bytes += is_weight(value) ? value.type.bytes() : 0;
  }
  return bytes;
}

Tensor contents(const Value& value) {
  if (value.constant.defined()) {
    return value.constant;
  }
  return value.source.load ? value.source.load() : Tensor(value.type.dtype, value.type.shape);
}

void write_initializer(onnx::TensorProto& proto, const Value& value, WeightFile* weights) {
  proto.set_name(value.name);
  if (weights == nullptr || value.kind == ValueKind::kConstant) {
    fill_tensor(proto, contents(value));
    return;
  }
  proto.set_data_type(dtype_to_onnx(value.type.dtype));
  for (const int64_t dim : value.type.shape) {
    proto.add_dims(dim);
  }
  weights->add(proto, value.type.bytes(), [&value] { return contents(value); });
}

void write_constant(onnx::NodeProto& proto, const Value& value) {
  proto.set_name(value.name);
  proto.set_op_type("Constant");
  proto.add_output(value.name);
  set_attribute(*proto.add_attribute(), "value", contents(value));
}

// The axis of an output that enumerates samples: the first, if it has the batch's size.
int output_batch_axis(const Graph& graph, const Value& output) {
  for (const ValueId id : graph.values_of_kind(ValueKind::kInput)) {
    const Value& input = graph.value(id);
    if (input.batch_axis >= 0 && !output.type.shape.empty()) {
      const int64_t batch = input.type.shape[static_cast<size_t>(input.batch_axis)];
      return output.type.shape[0] == batch ? 0 : -1;
    }
  }
  return -1;
}

}  // namespace

void write_onnx(const Graph& graph, const std::string& path, const ExportOptions& options) {
  onnx::ModelProto model;
  model.set_ir_version(kIrVersion);
  model.set_producer_name("trainrt");
  onnx::OperatorSetIdProto* opset = model.add_opset_import();
  opset->set_domain("");
  opset->set_version(options.opset);
  onnx::GraphProto& proto = *model.mutable_graph();
  proto.set_name("model");
  bool external = options.external_weights;
  if (!external && weight_bytes(graph) > kMostInlineBytes) {
    log_info("the weights exceed what an ONNX file can hold; they go to '", path, ".weights'");
    external = true;
  }
  std::unique_ptr<WeightFile> weights;
  if (external) {
    weights = std::make_unique<WeightFile>(path, options.write_weights);
  }
  for (const Value& value : graph.values()) {
    if (is_constant_node(value)) {
      write_constant(*proto.add_node(), value);
    } else if (is_weight(value)) {
      write_initializer(*proto.add_initializer(), value, weights.get());
    } else if (value.kind == ValueKind::kInput) {
      write_value_info(*proto.add_input(), value, value.batch_axis, options);
    }
  }
  for (const Node& node : graph.nodes()) {
    write_node(*proto.add_node(), graph, node);
  }
  for (const ValueId id : graph.outputs()) {
    const Value& value = graph.value(id);
    write_value_info(*proto.add_output(), value, output_batch_axis(graph, value), options);
  }
  write_model_file(model, path, weights.get());
}

}  // namespace trainrt
