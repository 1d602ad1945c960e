// One pass in node order folds everything, since a folded node's readers come after it.
#include "graph/passes/constant_folding.h"

#include <unordered_map>

#include "graph/evaluator.h"
#include "graph/op_def.h"
#include "graph/passes/pass.h"

namespace trainrt {

namespace {

// Integers that steer shapes are read even from an external file when they are few.
constexpr int64_t kMaxIntegerBytes = 64 << 10;

bool is_known(const Value& value) {
  return value.kind == ValueKind::kConstant &&
         (value.constant.defined() || (value.source.load && !is_floating(value.type.dtype) &&
                                       value.type.bytes() <= kMaxIntegerBytes));
}

bool is_pure(const Node& node) {
  const OpDef* def = find_op(node.op_type);
  return def != nullptr && !def->random && !def->effect;
}

bool within(const Graph& graph, const Node& node, const FoldLimits& limits) {
  int64_t largest_input = limits.enlarged_elements;
  for (const ValueId input : node.inputs) {
    if (input != kNoValue) {
      largest_input = std::max(largest_input, num_elements(graph.value(input).type.shape));
    }
  }
  const bool enlarges =
      node.op_type == "Expand" || node.op_type == "Fill" || node.op_type == "Tile";
  const int64_t limit = enlarges ? std::min(largest_input, limits.elements) : limits.elements;
  for (const ValueId output : node.outputs) {
    if (output != kNoValue && num_elements(graph.value(output).type.shape) > limit) {
      return false;
    }
  }
  return true;
}

// Evaluates the cone above a value, remembering shared parts.
class ConeEvaluator {
 public:
  ConeEvaluator(const Graph& graph, const FoldLimits& limits) : graph_(graph), limits_(limits) {}

  std::optional<Tensor> contents(ValueId id) {
    if (const auto it = known_.find(id); it != known_.end()) {
      return it->second;
    }
    const Value& value = graph_.value(id);
    if (num_elements(value.type.shape) > limits_.elements) {
      return std::nullopt;
    }
    if (value.kind == ValueKind::kConstant) {
      return known_[id] = initial_value(value);
    }
    if (value.producer == kNoNode || !is_pure(graph_.node(value.producer))) {
      return std::nullopt;
    }
    const Node& node = graph_.node(value.producer);
    std::vector<Tensor> inputs;
    for (const ValueId input : node.inputs) {
      inputs.emplace_back();
      if (input != kNoValue) {
        std::optional<Tensor> tensor = contents(input);
        if (!tensor) {
          return std::nullopt;
        }
        inputs.back() = *tensor;
      }
    }
    const std::vector<Tensor> outputs = evaluate_node(graph_, node, inputs);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (node.outputs[i] != kNoValue) {
        known_[node.outputs[i]] = outputs[i];
      }
    }
    return known_.at(id);
  }

 private:
  const Graph& graph_;
  const FoldLimits limits_;
  std::unordered_map<ValueId, Tensor> known_;
};

}  // namespace

bool is_foldable(const Graph& graph, const Node& node, const FoldLimits& limits) {
  if (!is_pure(node)) {
    return false;
  }
  for (const ValueId input : node.inputs) {
    if (input != kNoValue && !is_known(graph.value(input))) {
      return false;
    }
  }
  return within(graph, node, limits);
}

std::vector<ValueId> fold_node(Graph& graph, NodeId id) {
  const Node node = graph.node(id);  // a copy: the graph grows below
  std::vector<Tensor> inputs;
  for (const ValueId input : node.inputs) {
    inputs.push_back(input == kNoValue ? Tensor() : initial_value(graph.value(input)));
  }
  const std::vector<Tensor> outputs = evaluate_node(graph, node, inputs);
  std::vector<ValueId> constants;
  for (size_t i = 0; i < outputs.size(); ++i) {
    constants.push_back(
        node.outputs[i] == kNoValue
            ? kNoValue
            : graph.add_constant(graph.unique_value_name(graph.value(node.outputs[i]).name),
                                 outputs[i]));
  }
  return constants;
}

std::optional<Tensor> known_contents(const Graph& graph, ValueId value, const FoldLimits& limits) {
  return ConeEvaluator(graph, limits).contents(value);
}

Graph fold_constants(const Graph& graph) {
  Graph folded = graph;
  std::unordered_map<ValueId, ValueId> replaced;
  const auto current = [&](ValueId id) {
    const auto it = replaced.find(id);
    return it == replaced.end() ? id : it->second;
  };
  for (NodeId id = 0; id < graph.num_nodes(); ++id) {
    for (ValueId& input : folded.node(id).inputs) {
      input = current(input);
    }
    if (!is_foldable(folded, folded.node(id))) {
      continue;
    }
    const std::vector<ValueId> constants = fold_node(folded, id);
    const std::vector<ValueId> outputs = folded.node(id).outputs;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i] != kNoValue) {
        // The constant takes over the name.
        const std::string name = folded.value(outputs[i]).name;
        folded.rename_value(outputs[i], folded.unique_value_name(name + ".folded"));
        folded.rename_value(constants[i], name);
        replaced[outputs[i]] = constants[i];
      }
    }
  }
  for (ValueId& output : folded.outputs()) {
    output = current(output);
  }
  for (StateUpdate& update : folded.updates()) {
    update.new_value = current(update.new_value);
  }
  return eliminate_dead_code(folded);
}

}  // namespace trainrt
