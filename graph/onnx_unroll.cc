// Loop and Scan with a known number of iterations: the body is translated once per iteration. Its
// weights are made once, outside of the iterations, so they stay one parameter each.
#include "graph/onnx_translate.h"

namespace trainrt {

namespace {

// More would swell the graph beyond use.
constexpr int64_t kMaxIterations = 1024;

const onnx::GraphProto& body_of(const onnx::NodeProto& node) {
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    if (attribute.name() == "body" && attribute.has_g()) {
      return attribute.g();
    }
  }
  TRAINRT_FAIL(kInvalidModel, node.op_type(), " has no body");
}

ValueId stack(GraphBuilder& builder, std::vector<ValueId> parts, int64_t axis) {
  Shape shape = builder.shape(parts.at(0));
  axis += axis < 0 ? static_cast<int64_t>(shape.size()) + 1 : 0;
  TRAINRT_REQUIRE(axis >= 0 && axis <= static_cast<int64_t>(shape.size()),
                  kInvalidModel,
                  "scan output axis ",
                  axis,
                  " of ",
                  shape_string(shape));
  shape.insert(shape.begin() + axis, 1);
  for (ValueId& part : parts) {
    part = builder.reshape(part, shape);
  }
  return parts.size() == 1 ? parts[0] : builder.op("Concat", parts, {{"axis", axis}});
}

// x without dim `axis`, at position `at` of it.
ValueId slice_at(GraphBuilder& builder, ValueId x, int64_t axis, int64_t at) {
  Shape shape = builder.shape(x);
  shape.erase(shape.begin() + axis);
  const ValueId slice = builder.op("Slice",
                                   {x},
                                   {{"starts", std::vector<int64_t>{at}},
                                    {"ends", std::vector<int64_t>{at + 1}},
                                    {"axes", std::vector<int64_t>{axis}},
                                    {"steps", std::vector<int64_t>{1}}});
  return builder.reshape(slice, shape);
}

}  // namespace

std::vector<ValueId> OnnxTranslator::run_iteration(const onnx::NodeProto& node,
                                                   Scope& weights,
                                                   const std::vector<ValueId>& arguments,
                                                   int64_t iteration) {
  const onnx::GraphProto& body = body_of(node);
  TRAINRT_REQUIRE(body.input_size() == static_cast<int>(arguments.size()),
                  kInvalidModel,
                  "its body has ",
                  body.input_size(),
                  " inputs; wanted ",
                  arguments.size());
  Scope scope;
  scope.outer = &weights;
  scope.owner = weights.owner;
  scope.opsets = weights.opsets;
  scope.attributes = weights.attributes;
  scope.prefix = concat(weights.prefix, iteration, "/");
  scope.counts = weights.counts;
  scope.depth = weights.depth;
  for (int i = 0; i < body.input_size(); ++i) {
    scope.values[body.input(i).name()] = arguments[static_cast<size_t>(i)];
  }
  std::vector<ValueId> results;
  within(scope, [&] {
    translate_nodes(body.node());
    for (const onnx::ValueInfoProto& output : body.output()) {
      const std::optional<ValueId> result = find(output.name());
      TRAINRT_REQUIRE(result.has_value(), kUnsupported, "an operator of its body is not supported");
      results.push_back(*result);
    }
  });
  return results;
}

void OnnxTranslator::open_body(const onnx::NodeProto& node, Scope& weights) {
  weights.outer = scope_;
  weights.owner = scope_->owner;
  weights.opsets = scope_->opsets;
  weights.attributes = scope_->attributes;
  weights.prefix = node_name(node) + "/";
  weights.counts = scope_->counts;
  weights.depth = scope_->depth + 1;
  for (const onnx::TensorProto& tensor : body_of(node).initializer()) {
    weights.initializers[tensor.name()] = &tensor;
  }
}

void OnnxTranslator::unroll_loop(const onnx::NodeProto& node, const std::vector<ValueId>& inputs) {
  const auto known = [&](size_t i) -> std::optional<int64_t> {
    if (i >= inputs.size() || inputs[i] == kNoValue) {
      return std::nullopt;
    }
    const std::optional<Tensor> tensor = contents(inputs[i]);
    TRAINRT_REQUIRE(tensor && tensor->num_elements() == 1,
                    kUnsupported,
                    "its number of iterations depends on data");
    return tensor->to_int64()[0];
  };
  const int64_t trips = known(0).value_or(kMaxIterations + 1);
  bool go_on = known(1).value_or(1) != 0;
  Scope weights;
  open_body(node, weights);
  GraphBuilder builder(graph_);
  builder.set_source_index(source_index_);
  std::vector<ValueId> carried(inputs.begin() + std::min<size_t>(2, inputs.size()), inputs.end());
  std::vector<std::vector<ValueId>> scanned(
      static_cast<size_t>(std::max(0, node.output_size() - static_cast<int>(carried.size()))));
  for (int64_t i = 0; go_on && i < trips; ++i) {
    TRAINRT_REQUIRE(
        i < kMaxIterations, kUnsupported, "it has more than ", kMaxIterations, " iterations");
    std::vector<ValueId> arguments = {builder.constant(Tensor::scalar<int64_t>(i)),
                                      builder.constant(Tensor::scalar<bool>(true))};
    arguments.insert(arguments.end(), carried.begin(), carried.end());
    const std::vector<ValueId> results = run_iteration(node, weights, arguments, i);
    TRAINRT_REQUIRE(results.size() >= 1 + carried.size() + scanned.size(),
                    kInvalidModel,
                    "its body has ",
                    results.size(),
                    " outputs; wanted ",
                    1 + carried.size() + scanned.size());
    const std::optional<Tensor> condition = contents(results[0]);
    TRAINRT_REQUIRE(condition && condition->num_elements() == 1,
                    kUnsupported,
                    "its number of iterations depends on data");
    go_on = condition->to_int64()[0] != 0;
    std::copy_n(results.begin() + 1, carried.size(), carried.begin());
    for (size_t k = 0; k < scanned.size(); ++k) {
      scanned[k].push_back(results[1 + carried.size() + k]);
    }
  }
  for (size_t k = 0; k < carried.size(); ++k) {
    set_output(node, static_cast<int>(k), carried[k]);
  }
  for (size_t k = 0; k < scanned.size(); ++k) {
    TRAINRT_REQUIRE(!scanned[k].empty(),
                    kUnsupported,
                    "it has no iteration to take output ",
                    carried.size() + k,
                    " from");
    set_output(node, static_cast<int>(carried.size() + k), stack(builder, scanned[k], 0));
  }
}

void OnnxTranslator::unroll_scan(const onnx::NodeProto& node, const std::vector<ValueId>& inputs) {
  TRAINRT_REQUIRE(opset("") >= 9, kUnsupported, "Scan before opset 9");
  const Attributes values = attributes(node);
  const auto num_scan = static_cast<size_t>(values.get_int("num_scan_inputs"));
  TRAINRT_REQUIRE(num_scan >= 1 && num_scan <= inputs.size(),
                  kInvalidModel,
                  "num_scan_inputs is ",
                  num_scan,
                  " of ",
                  inputs.size(),
                  " inputs");
  const size_t num_state = inputs.size() - num_scan;
  const size_t num_out = static_cast<size_t>(node.output_size()) - num_state;
  const auto zeros = [](size_t n) { return std::vector<int64_t>(n, 0); };
  std::vector<int64_t> axes = values.get_ints("scan_input_axes", zeros(num_scan));
  const std::vector<int64_t> backwards = values.get_ints("scan_input_directions", zeros(num_scan));
  const std::vector<int64_t> out_axes = values.get_ints("scan_output_axes", zeros(num_out));
  const std::vector<int64_t> out_backwards =
      values.get_ints("scan_output_directions", zeros(num_out));
  int64_t length = -1;
  for (size_t k = 0; k < num_scan; ++k) {
    const Shape& shape =
        graph_.value(required_input(inputs, static_cast<int>(num_state + k))).type.shape;
    axes.at(k) = normalize_axis(axes.at(k), static_cast<int>(shape.size()));
    const int64_t size = shape[static_cast<size_t>(axes[k])];
    TRAINRT_REQUIRE(length < 0 || size == length,
                    kInvalidModel,
                    "its inputs are ",
                    length,
                    " and ",
                    size,
                    " long");
    length = size;
  }
  TRAINRT_REQUIRE(length > 0 && length <= kMaxIterations,
                  kUnsupported,
                  "it has ",
                  length,
                  " iterations; wanted 1 to ",
                  kMaxIterations);
  Scope weights;
  open_body(node, weights);
  GraphBuilder builder(graph_);
  builder.set_source_index(source_index_);
  std::vector<ValueId> state(inputs.begin(), inputs.begin() + static_cast<int64_t>(num_state));
  std::vector<std::vector<ValueId>> scanned(num_out);
  for (int64_t i = 0; i < length; ++i) {
    std::vector<ValueId> arguments = state;
    for (size_t k = 0; k < num_scan; ++k) {
      const int64_t at = backwards.at(k) != 0 ? length - 1 - i : i;
      arguments.push_back(slice_at(builder, inputs[num_state + k], axes[k], at));
    }
    const std::vector<ValueId> results = run_iteration(node, weights, arguments, i);
    TRAINRT_REQUIRE(results.size() >= num_state + num_out,
                    kInvalidModel,
                    "its body has ",
                    results.size(),
                    " outputs; wanted ",
                    num_state + num_out);
    std::copy_n(results.begin(), num_state, state.begin());
    for (size_t k = 0; k < num_out; ++k) {
      const auto at = out_backwards.at(k) != 0 ? scanned[k].begin() : scanned[k].end();
      scanned[k].insert(at, results[num_state + k]);
    }
  }
  for (size_t k = 0; k < num_state; ++k) {
    set_output(node, static_cast<int>(k), state[k]);
  }
  for (size_t k = 0; k < num_out; ++k) {
    set_output(node, static_cast<int>(num_state + k), stack(builder, scanned[k], out_axes.at(k)));
  }
}

}  // namespace trainrt
