#include "graph/fused_elementwise.h"

#include <set>
#include <utility>

#include "graph/base/error.h"

namespace trainrt {

namespace {

std::set<std::string>& elementwise() {
  static std::set<std::string> registered;
  return registered;
}

// Attributes of step 3 are "3.alpha" and the like.
std::string prefix(size_t step) {
  return concat(step, ".");
}

TensorTypes operand_types(const FusedStep& step, const TensorTypes& known) {
  TensorTypes types;
  for (const int operand : step.operands) {
    types.push_back(known.at(static_cast<size_t>(operand)));
  }
  return types;
}

}  // namespace

RegisterElementwise::RegisterElementwise(const std::string& op_type) {
  elementwise().insert(op_type);
}

bool is_elementwise(const std::string& op_type) {
  return elementwise().count(op_type) != 0;
}

Attributes FusedExpression::to_attributes() const {
  std::vector<std::string> ops;
  std::vector<int64_t> num_operands, operands;
  Attributes attributes;
  for (size_t i = 0; i < steps.size(); ++i) {
    ops.push_back(steps[i].op_type);
    num_operands.push_back(static_cast<int64_t>(steps[i].operands.size()));
    operands.insert(operands.end(), steps[i].operands.begin(), steps[i].operands.end());
    for (const auto& [name, value] : steps[i].attributes) {
      attributes.set(prefix(i) + name, value);
    }
  }
  attributes.set("inputs", int64_t{num_inputs});
  attributes.set("steps", std::move(ops));
  attributes.set("num_operands", std::move(num_operands));
  attributes.set("operands", std::move(operands));
  attributes.set("outputs", std::vector<int64_t>(outputs.begin(), outputs.end()));
  return attributes;
}

FusedExpression FusedExpression::of(const Attributes& attributes) {
  FusedExpression expression;
  expression.num_inputs = static_cast<int>(attributes.get_int("inputs"));
  const std::vector<std::string> ops = attributes.get_strings("steps", {});
  const std::vector<int64_t>& num_operands = attributes.get_ints("num_operands");
  const std::vector<int64_t>& operands = attributes.get_ints("operands");
  const auto require = [](bool holds) {
    TRAINRT_REQUIRE(holds, kInvalidModel, kFusedElementwise, ": its steps do not fit together");
  };
  require(!ops.empty() && num_operands.size() == ops.size());
  size_t next = 0;
  for (size_t i = 0; i < ops.size(); ++i) {
    FusedStep step{ops[i], {}, {}};
    for (int64_t k = 0; k < num_operands[i]; ++k) {
      require(next < operands.size() && operands[next] >= 0 &&
              operands[next] < expression.num_inputs + static_cast<int64_t>(i));
      step.operands.push_back(static_cast<int>(operands[next++]));
    }
    expression.steps.push_back(std::move(step));
  }
  require(next == operands.size());
  for (const int64_t output : attributes.get_ints("outputs")) {
    require(output >= 0 && output < static_cast<int64_t>(ops.size()));
    expression.outputs.push_back(static_cast<int>(output));
  }
  for (const auto& [name, value] : attributes) {
    const size_t dot = name.find('.');
    if (dot != std::string::npos) {
      const size_t step = std::stoul(name.substr(0, dot));
      require(step < ops.size());
      expression.steps[step].attributes.set(name.substr(dot + 1), value);
    }
  }
  return expression;
}

Node step_node(const Node& fused, const FusedExpression& expression, size_t step) {
  Node node;
  node.name = concat(fused.name, "/", step);
  node.op_type = expression.steps[step].op_type;
  node.attributes = expression.steps[step].attributes;
  node.inputs.assign(expression.steps[step].operands.size(), 0);
  node.outputs.assign(1, 0);
  node.region = fused.region;
  return node;
}

TensorTypes fused_step_types(const FusedExpression& expression, const TensorTypes& inputs) {
  TensorTypes known = inputs;
  for (size_t i = 0; i < expression.steps.size(); ++i) {
    const FusedStep& step = expression.steps[i];
    const OpDef& def = get_op(step.op_type);
    TRAINRT_REQUIRE(is_elementwise(step.op_type),
                    kInvalidModel,
                    kFusedElementwise,
                    ": '",
                    step.op_type,
                    "' is not element-wise");
    const Node node = step_node({}, expression, i);
    const TensorTypes types = def.infer_types(OpContext(
        node, operand_types(step, known), std::vector<bool>(step.operands.size(), true), {}));
    TRAINRT_REQUIRE(types.size() == 1 && is_floating(types[0].dtype) &&
                        (i == 0 || types[0].shape == known.back().shape),
                    kInvalidModel,
                    kFusedElementwise,
                    ": step ",
                    i,
                    " (",
                    step.op_type,
                    ") is ",
                    shape_string(types[0].shape),
                    ", the one before it ",
                    shape_string(known.back().shape));
    known.push_back(types[0]);
  }
  return {known.begin() + static_cast<std::ptrdiff_t>(inputs.size()), known.end()};
}

}  // namespace trainrt
