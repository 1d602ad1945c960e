#include "tests/support/elementwise_steps.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "graph/fused_elementwise.h"
#include "tests/support/device_case.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {

namespace {

bool is_floating_throughout(const OpDef& op, const OpExample& example) {
  const NodeCase test_case = make_case(op, example);
  const auto is_float = [](const TensorType& type) { return is_floating(type.dtype); };
  return std::all_of(test_case.input_types.begin(), test_case.input_types.end(), is_float) &&
         std::all_of(test_case.output_types.begin(), test_case.output_types.end(), is_float);
}

// Results of all steps, each by its operator's own kernel.
std::vector<Tensor> run_steps(const NodeCase& fused,
                              const FusedExpression& expression,
                              Device& device) {
  std::vector<Tensor> values = fused.inputs;
  TensorTypes types = fused.input_types;
  const TensorTypes step_types = fused_step_types(expression, types);
  for (size_t i = 0; i < expression.steps.size(); ++i) {
    NodeCase step;
    step.node = step_node(fused.node, expression, i);
    for (const int operand : expression.steps[i].operands) {
      step.inputs.push_back(values[static_cast<size_t>(operand)]);
      step.input_types.push_back(types[static_cast<size_t>(operand)]);
      step.present.push_back(true);
    }
    step.output_types = {step_types[i]};
    values.push_back(run_on_device(step, device)[0]);
    types.push_back(step_types[i]);
  }
  return {values.begin() + static_cast<std::ptrdiff_t>(fused.inputs.size()), values.end()};
}

}  // namespace

std::vector<std::string> elementwise_ops() {
  std::vector<std::string> names;
  for (const std::string& name : op_names()) {
    if (is_elementwise(name) && !as_step(name).examples.empty()) {
      names.push_back(name);
    }
  }
  return names;
}

OpDef as_step(const std::string& name) {
  const OpDef& op = get_op(name);
  OpDef fused = get_op(kFusedElementwise);
  fused.examples.clear();
  for (OpExample example : op.examples) {
    if (!is_floating_throughout(op, example)) {
      continue;
    }
    FusedExpression expression;
    expression.num_inputs = static_cast<int>(example.inputs.size());
    FusedStep step{name, example.attributes, {}};
    for (int i = 0; i < expression.num_inputs; ++i) {
      step.operands.push_back(i);
    }
    expression.steps = {step, {"Neg", {}, {expression.num_inputs}}};
    expression.outputs = {1, 0};
    example.attributes = expression.to_attributes();
    fused.examples.push_back(example);
  }
  return fused;
}

void expect_bits_of_single_kernels(const OpDef& fused, Device& device) {
  for (const OpExample& example : fused.examples) {
    const FusedExpression expression = FusedExpression::of(example.attributes);
    for (const DType dtype :
         {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
      SCOPED_TRACE(concat("example '", example.name, "', ", dtype_name(dtype)));
      const NodeCase test_case = make_case(fused, example, dtype);
      const std::vector<Tensor> results = run_on_device(test_case, device);
      const std::vector<Tensor> steps = run_steps(test_case, expression, device);
      for (size_t i = 0; i < results.size(); ++i) {
        const size_t step = static_cast<size_t>(expression.outputs[i]);
        EXPECT_TRUE(tensors_identical(results[i], steps[step])) << "output " << i;
      }
    }
  }
}

}  // namespace trainrt::testing
