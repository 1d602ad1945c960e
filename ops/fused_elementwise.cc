// FusedElementwise: a chain of element-wise operators in one pass over memory. Emitted where a
// GPU's program is settled (parallel/passes/elementwise_fusion); its CUDA kernel is compiled from
// the steps' functors. The reference kernel runs the steps' own, one by one.
#include "graph/fused_elementwise.h"

#include <cstring>

#include "graph/autodiff.h"
#include "graph/graph_builder.h"

namespace trainrt {

namespace {

TensorTypes types_of_inputs(const OpContext& op) {
  TensorTypes types;
  for (int i = 0; i < op.num_inputs(); ++i) {
    types.push_back(op.input_type(i));
  }
  return types;
}

TensorTypes infer(const OpContext& op) {
  const FusedExpression expression = FusedExpression::of(op.attributes());
  TRAINRT_REQUIRE(op.num_inputs() == expression.num_inputs,
                  kInvalidModel,
                  kFusedElementwise,
                  " has ",
                  op.num_inputs(),
                  " inputs, its steps read ",
                  expression.num_inputs);
  const TensorTypes steps = fused_step_types(expression, types_of_inputs(op));
  TensorTypes outputs;
  for (const int step : expression.outputs) {
    outputs.push_back(steps[static_cast<size_t>(step)]);
  }
  return outputs;
}

// The work of all steps; memory is what the node itself reads and writes.
Cost cost(const OpContext& op) {
  const FusedExpression expression = FusedExpression::of(op.attributes());
  TensorTypes types = types_of_inputs(op);
  const TensorTypes steps = fused_step_types(expression, types);
  types.insert(types.end(), steps.begin(), steps.end());
  Cost total = memory_bound_cost(op, 0);
  for (size_t i = 0; i < steps.size(); ++i) {
    const Node node = step_node(op.node(), expression, i);
    TensorTypes operands;
    for (const int operand : expression.steps[i].operands) {
      operands.push_back(types[static_cast<size_t>(operand)]);
    }
    const std::vector<bool> present(operands.size(), true);
    total.flops +=
        get_op(node.op_type).cost(OpContext(node, std::move(operands), present, {steps[i]})).flops;
  }
  return total;
}

// Results lie apart until all steps are done: an output may be an input's memory.
void reference(KernelContext& op) {
  const FusedExpression expression = FusedExpression::of(op.attributes());
  TensorTypes types;
  std::vector<void*> data;
  for (int i = 0; i < op.num_inputs(); ++i) {
    types.push_back(op.input_type(i));
    data.push_back(op.raw_input(i));
  }
  const TensorTypes steps = fused_step_types(expression, types);
  types.insert(types.end(), steps.begin(), steps.end());
  std::vector<Tensor> results;
  for (size_t i = 0; i < steps.size(); ++i) {
    results.emplace_back(steps[i].dtype, steps[i].shape);
    data.push_back(results.back().raw());
    const Node node = step_node(op.node(), expression, i);
    std::vector<TensorRef> inputs;
    for (const int operand : expression.steps[i].operands) {
      inputs.push_back({data[static_cast<size_t>(operand)], &types[static_cast<size_t>(operand)]});
    }
    const TensorRef output{data.back(), &steps[i]};
    KernelContext step(node, inputs, {&output, 1}, {}, op.device(), op.step());
    get_op(node.op_type).reference_kernel(step);
  }
  for (int i = 0; i < op.num_outputs(); ++i) {
    if (op.has_output(i)) {
      const Tensor& result =
          results[static_cast<size_t>(expression.outputs[static_cast<size_t>(i)])];
      std::memcpy(op.raw_output(i), result.raw(), static_cast<size_t>(result.bytes()));
    }
  }
}

OpExample example(const char* name, FusedExpression expression, std::vector<Shape> shapes) {
  OpExample result;
  result.name = name;
  expression.num_inputs = static_cast<int>(shapes.size());
  result.attributes = expression.to_attributes();
  for (Shape& shape : shapes) {
    result.inputs.push_back({DType::kFloat32, std::move(shape)});
  }
  return result;
}

OpDef fused_elementwise_op() {
  OpDef op;
  op.name = kFusedElementwise;
  op.infer_types = infer;
  op.cost = cost;
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context);
  };
  op.reference_kernel = reference;
  op.not_differentiable = true;
  op.examples = {
      example("gated",
              {.steps = {{"Swish", {{"alpha", 1.5}}, {0}}, {"Mul", {}, {2, 1}}}, .outputs = {1}},
              {{3, 8}, {3, 8}}),
      example("all_results",
              {.steps = {{"Mul", {}, {0, 1}}, {"Add", {}, {4, 2}}, {"SwishGrad", {}, {3, 5}}},
               .outputs = {2, 0, 1}},
              {{4, 6, 16}, {4, 1, 16}, {16}, {}}),
      example(
          "odd_sizes",
          {.steps = {{"Sub", {}, {0, 1}}, {"Tanh", {}, {2}}, {"Mul", {}, {3, 3}}}, .outputs = {2}},
          {{5, 7, 3}, {7, 1}}),
  };
  return op;
}

const RegisterOp kFused{fused_elementwise_op()};

}  // namespace

}  // namespace trainrt
