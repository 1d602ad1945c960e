// The translator's side of onnx_baked_batch: which operand of a node is a shape, and what becomes
// of a recurrent network's initial state that was made for the example batch.
#include <algorithm>

#include "graph/onnx_translate.h"

namespace trainrt {

namespace {

std::optional<size_t> shape_operand(const onnx::NodeProto& node) {
  if (!canonical_domain(node.domain()).empty()) {
    return std::nullopt;
  }
  if (node.op_type() == "Reshape" || node.op_type() == "Expand") {
    return 1;
  }
  if (node.op_type() == "Resize") {
    return 3;  // sizes; absent where scales are given
  }
  return node.op_type() == "ConstantOfShape" ? std::optional<size_t>(0) : std::nullopt;
}

bool expands_to(const Shape& from, const std::vector<int64_t>& to) {
  const size_t common = std::min(from.size(), to.size());
  for (size_t d = 1; d <= common; ++d) {
    const int64_t have = from[from.size() - d];
    const int64_t want = to[to.size() - d];
    if (have != want && have != 1 && want != 1) {
      return false;
    }
  }
  return true;
}

bool is_recurrent(const onnx::NodeProto& node) {
  return node.op_type() == "LSTM" || node.op_type() == "GRU" || node.op_type() == "RNN";
}

}  // namespace

std::vector<ValueId> OnnxTranslator::follow_batch(const onnx::NodeProto& node,
                                                  const std::vector<ValueId>& inputs) {
  const std::optional<size_t> operand = shape_operand(node);
  if (operand && *operand < inputs.size() && inputs[*operand] != kNoValue) {
    return rewrite_shape(node, inputs, *operand);
  }
  if (options_.rewriter != nullptr && is_recurrent(node)) {
    return rewrite_initial_state(node, inputs);
  }
  return inputs;
}

std::vector<ValueId> OnnxTranslator::rewrite_shape(const onnx::NodeProto& node,
                                                   const std::vector<ValueId>& inputs,
                                                   size_t shape_input) {
  const std::optional<Tensor> contents_now = contents(inputs[shape_input]);
  if (!contents_now) {
    return inputs;
  }
  const std::vector<int64_t> shape = contents_now->to_int64();
  const Shape input = shape_input == 0 ? Shape() : graph_.value(inputs[0]).type.shape;
  if (options_.record != nullptr) {
    options_.record->nodes[node_name(node)] = {input, {}, shape};
    return inputs;
  }
  const auto changed = options_.rewriter->rewrite(node_name(node), node.op_type(), input, shape);
  std::vector<ValueId> result = inputs;
  if (node.op_type() == "Expand" && !expands_to(input, changed.value_or(shape))) {
    result[0] = shrink_uniform(inputs[0]);
    if (!changed) {
      options_.rewriter->note(node_name(node));
    }
  }
  if (!changed) {
    return result;
  }
  result[shape_input] = graph_.add_constant(
      graph_.unique_value_name(graph_.value(inputs[shape_input]).name + ".batch"),
      Tensor::from(*changed, {static_cast<int64_t>(changed->size())}));
  return result;
}

// A constant that was made at the example batch, all elements the same, becomes a single number.
ValueId OnnxTranslator::shrink_uniform(ValueId operand) {
  const TensorType type = graph_.value(operand).type;
  const std::optional<Tensor> known = contents(operand);
  const std::vector<double> data = known ? known->to_double() : std::vector<double>();
  if (data.empty() ||
      std::any_of(data.begin(), data.end(), [&](double element) { return element != data[0]; })) {
    return operand;
  }
  GraphBuilder builder(graph_);
  builder.set_source_index(source_index_);
  return builder.fill(data[0], {type.dtype, Shape(type.shape.size(), 1)});
}

void OnnxTranslator::record_output(const onnx::NodeProto& node) {
  const auto it = options_.record->nodes.find(node_name(node));
  if (it != options_.record->nodes.end() && node.output_size() > 0) {
    if (const std::optional<ValueId> output = find(node.output(0))) {
      it->second.output = graph_.value(*output).type.shape;
    }
  }
}

// initial_h and initial_c are [directions, batch, hidden] ([batch, directions, hidden] for layout
// 1). Equal rows, as of the usual zeros, serve any number of samples.
std::vector<ValueId> OnnxTranslator::rewrite_initial_state(const onnx::NodeProto& node,
                                                           const std::vector<ValueId>& inputs) {
  const bool batch_first = attributes(node).get_int("layout", 0) != 0;
  const size_t axis = batch_first ? 0 : 1;
  const Shape x = graph_.value(required_input(inputs, 0)).type.shape;
  std::vector<ValueId> result = inputs;
  for (size_t i = 5; i < std::min<size_t>(inputs.size(), 7); ++i) {
    if (inputs[i] == kNoValue) {
      continue;
    }
    Shape shape = graph_.value(inputs[i]).type.shape;
    if (x.size() != 3 || shape.size() != 3 || shape[axis] == x[axis]) {
      continue;
    }
    GraphBuilder builder(graph_);
    builder.set_source_index(source_index_);
    if (shape[axis] != 1) {
      const std::optional<Tensor> state = contents(inputs[i]);
      const std::vector<double> data = state ? state->to_double() : std::vector<double>();
      if (data.empty() || std::any_of(data.begin(), data.end(), [&](double element) {
            return element != data[0];
          })) {
        continue;
      }
      shape[axis] = x[axis];
      result[i] = builder.fill(data[0], {graph_.value(inputs[i]).type.dtype, shape});
    } else {
      shape[axis] = x[axis];
      result[i] = builder.expand(inputs[i], shape);
    }
    options_.rewriter->note(node_name(node));
  }
  return result;
}

}  // namespace trainrt
