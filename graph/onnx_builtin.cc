// Operators that never reach the registry: constants, aliases, what follows from shapes alone, and
// the inference form of BatchNormalization and Dropout for `eval`.
#include <algorithm>
#include <cmath>

#include "graph/onnx_tensor.h"
#include "graph/onnx_translate.h"
#include "graph/op_def.h"

namespace trainrt {

namespace {

// Longest Range that is computed at import.
constexpr int64_t kMaxRange = 4 << 20;

}  // namespace

bool OnnxTranslator::translate_builtin(const onnx::NodeProto& node,
                                       const std::vector<ValueId>& inputs) {
  if (!canonical_domain(node.domain()).empty()) {
    return false;
  }
  const std::string& op = node.op_type();
  if (op == "Constant") {
    translate_constant(node);
    return true;
  }
  if (op == "Identity") {
    set_output(node, 0, required_input(inputs, 0));
    return true;
  }
  if (op == "Shape" || op == "Size") {
    translate_shape(node, required_input(inputs, 0));
    return true;
  }
  if (op == "ConstantOfShape") {
    translate_constant_of_shape(node, required_input(inputs, 0));
    return true;
  }
  if (op == "Range") {
    return translate_range(node, inputs);
  }
  if (op == "If") {
    return inline_branch(node, inputs);
  }
  if (op == "Loop" || op == "Scan") {
    op == "Loop" ? unroll_loop(node, inputs) : unroll_scan(node, inputs);
    return true;
  }
  if (op == "BatchNormalization" || op == "Dropout") {
    return inference_form(node, inputs);
  }
  return false;
}

void OnnxTranslator::translate_constant(const onnx::NodeProto& node) {
  const std::string name = scope_->prefix + node.output(0);
  const Attributes values = attributes(node);
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    Value value;
    value.name = name;
    if (attribute.name() == "value" && attribute.ref_attr_name().empty()) {
      value.type = tensor_type(attribute.t(), concat("constant '", name, "'"));
      value.source = tensor_source(scope_->owner, attribute.t(), model_.files);
      set_output(node,
                 0,
                 add_weight(std::move(value),
                            WeightCandidate::Origin::kConstantNode,
                            !has_external_data(attribute.t())));
      return;
    }
    if (attribute.name() == "sparse_value") {
      value.type = tensor_type(attribute.sparse_tensor(), concat("constant '", name, "'"));
      value.source = tensor_source(scope_->owner, attribute.sparse_tensor(), model_.files);
      set_output(
          node, 0, add_weight(std::move(value), WeightCandidate::Origin::kConstantNode, true));
      return;
    }
  }
  Tensor data;
  if (values.has("value")) {
    data = values.get_tensor("value");
  } else if (values.has("value_int")) {
    data = Tensor::scalar<int64_t>(values.get_int("value_int"));
  } else if (values.has("value_float")) {
    data = Tensor::scalar<float>(static_cast<float>(values.get_float("value_float")));
  } else if (values.has("value_ints")) {
    const std::vector<int64_t>& list = values.get_ints("value_ints");
    data = Tensor::from<int64_t>(list, {static_cast<int64_t>(list.size())});
  } else if (values.has("value_floats")) {
    const std::vector<double> list = values.get_floats("value_floats", {});
    data = Tensor::from<float>({list.begin(), list.end()}, {static_cast<int64_t>(list.size())});
  } else {
    TRAINRT_FAIL(kUnsupported, "constant '", name, "' holds neither numbers nor a tensor");
  }
  set_output(node, 0, graph_.add_constant(graph_.unique_value_name(name), std::move(data)));
}

void OnnxTranslator::translate_shape(const onnx::NodeProto& node, ValueId input) {
  const Shape& shape = graph_.value(input).type.shape;
  const std::string name = graph_.unique_value_name(scope_->prefix + node.output(0));
  if (node.op_type() == "Size") {
    set_output(node, 0, graph_.add_constant(name, Tensor::scalar(num_elements(shape))));
    return;
  }
  const Attributes values = attributes(node);
  const auto ndim = static_cast<int64_t>(shape.size());
  const auto clamp = [ndim](int64_t at) {
    return std::clamp<int64_t>(at < 0 ? at + ndim : at, 0, ndim);
  };
  const int64_t start = clamp(values.get_int("start", 0));
  const int64_t end = std::max(start, clamp(values.get_int("end", ndim)));
  const std::vector<int64_t> dims(shape.begin() + start, shape.begin() + end);
  set_output(node, 0, graph_.add_constant(name, Tensor::from(dims, {end - start})));
}

bool OnnxTranslator::translate_range(const onnx::NodeProto& node,
                                     const std::vector<ValueId>& inputs) {
  std::vector<Tensor> operands;
  for (int i = 0; i < 3; ++i) {
    const std::optional<Tensor> tensor = contents(required_input(inputs, i));
    TRAINRT_REQUIRE(tensor && tensor->num_elements() == 1,
                    kUnsupported,
                    "the length of a Range depends on data");
    operands.push_back(i == 0 ? *tensor : tensor->cast(operands[0].dtype()));
  }
  const double start = operands[0].to_double()[0];
  const double delta = operands[2].to_double()[0];
  TRAINRT_REQUIRE(delta != 0, kInvalidModel, "Range has a step of 0");
  const double count = std::ceil((operands[1].to_double()[0] - start) / delta);
  TRAINRT_REQUIRE(count <= kMaxRange, kUnsupported, "a Range of ", count, " elements");
  const auto size = static_cast<int64_t>(std::max(0.0, count));
  Tensor result(operands[0].dtype(), {size});
  dispatch_all(operands[0].dtype(), [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_integral_v<T>) {
      const T first = operands[0].data<T>()[0];
      const T step = operands[2].data<T>()[0];
      for (int64_t i = 0; i < size; ++i) {
        result.data<T>()[i] = static_cast<T>(first + static_cast<T>(i) * step);
      }
    } else {
      for (int64_t i = 0; i < size; ++i) {
        result.data<T>()[i] =
            static_cast<T>(static_cast<float>(start + static_cast<double>(i) * delta));
      }
    }
  });
  set_output(node,
             0,
             graph_.add_constant(graph_.unique_value_name(scope_->prefix + node.output(0)),
                                 std::move(result)));
  return true;
}

void OnnxTranslator::translate_constant_of_shape(const onnx::NodeProto& node, ValueId shape) {
  const std::optional<Tensor> dims = contents(shape);
  TRAINRT_REQUIRE(
      dims.has_value(), kUnsupported, "the shape '", graph_.value(shape).name, "' depends on data");
  const Attributes values = attributes(node);
  const Tensor value = values.has("value") ? values.get_tensor("value") : Tensor::scalar(0.0f);
  TRAINRT_REQUIRE(value.num_elements() == 1,
                  kInvalidModel,
                  "its value has ",
                  value.num_elements(),
                  " elements; wanted 1");
  const NodeId first_node = graph_.num_nodes();
  const ValueId first_value = graph_.num_values();
  GraphBuilder builder(graph_);
  builder.set_source_index(source_index_);
  // An integer that float64 does not hold (a hash's constant, an end beyond all ends) is spread.
  const double number = value.to_double()[0];
  const bool fills =
      !is_integer(value.dtype()) ||
      identical(Tensor::from(std::vector<double>{number}, value.shape()).cast(value.dtype()),
                value);
  const ValueId filled =
      fills ? builder.op("Fill",
                         {},
                         {{"value", number},
                          {"shape", dims->to_int64()},
                          {"dtype", std::string(dtype_name(value.dtype()))}},
                         node_name(node))
            : builder.op(
                  "Expand",
                  {graph_.add_constant(
                      graph_.unique_value_name(scope_->prefix + node.output(0) + "/value"), value)},
                  {{"shape", dims->to_int64()}},
                  node_name(node));
  finish(node, {filled}, first_node, first_value);
}

// Statistics are state by their position, whatever the form; see onnx_parameters.h.
void OnnxTranslator::mark_running_statistics(const onnx::NodeProto& node,
                                             const std::vector<ValueId>& inputs) {
  for (const int i : {3, 4}) {
    Value& value = graph_.value(required_input(inputs, i));
    if (value.kind == ValueKind::kConstant && !value.constant.defined()) {
      value.kind = ValueKind::kState;
      value.why = concat(i == 3 ? "running mean" : "running variance",
                         " of BatchNormalization '",
                         node_name(node),
                         "'");
    }
  }
}

// The random node that computed the output before is then read by nobody.
void OnnxTranslator::settle(const onnx::NodeProto& node) {
  const auto it = model_.settled.find(&node);
  if (it == model_.settled.end()) {
    return;
  }
  const std::optional<ValueId> drawn = find(node.output(0));
  if (!drawn) {
    return;
  }
  const TensorType type = graph_.value(*drawn).type;
  if (it->second.input < 0) {
    GraphBuilder builder(graph_);
    builder.set_source_index(source_index_);
    set_output(node, 0, builder.fill(it->second.value, type));
    return;
  }
  const ValueId kept = *find(node.input(it->second.input));
  if (graph_.value(kept).type == type) {
    set_output(node, 0, kept);
  }
}

bool OnnxTranslator::inference_form(const onnx::NodeProto& node,
                                    const std::vector<ValueId>& inputs) {
  if (node.op_type() == "BatchNormalization") {
    mark_running_statistics(node, inputs);
    if (options_.training) {
      return false;
    }
    onnx::NodeProto plain = node;
    plain.clear_attribute();
    for (const onnx::AttributeProto& attribute : node.attribute()) {
      if (attribute.name() != "training_mode" && attribute.name() != "is_test") {
        *plain.add_attribute() = attribute;
      }
    }
    if (opset("") < 7) {
      onnx::AttributeProto* is_test = plain.add_attribute();
      is_test->set_name("is_test");
      is_test->set_type(onnx::AttributeProto::INT);
      is_test->set_i(1);
    }
    // Whoever reads the new statistics reads the old ones.
    for (int i = 1; i < node.output_size(); ++i) {
      set_output(node, i, required_input(inputs, i % 2 == 1 ? 3 : 4));
    }
    plain.mutable_output()->DeleteSubrange(1, plain.output_size() - 1);
    upgrade(plain, inputs, find_upgrade("", "BatchNormalization"));
    return true;
  }
  if (options_.training) {
    return false;
  }
  set_output(node, 0, required_input(inputs, 0));
  if (node.output_size() > 1 && !node.output(1).empty()) {
    GraphBuilder builder(graph_);
    builder.set_source_index(source_index_);
    set_output(node,
               1,
               builder.op("Fill",
                          {},
                          {{"value", 1.0},
                           {"shape", graph_.value(required_input(inputs, 0)).type.shape},
                           {"dtype", std::string("bool")}},
                          node_name(node) + "/mask",
                          scope_->prefix + node.output(1)));
  }
  return true;
}

}  // namespace trainrt
