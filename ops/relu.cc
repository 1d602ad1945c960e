// Relu, LeakyRelu, PRelu and ThresholdedRelu. The derivative at the kink is that of the left side,
// as in PyTorch. The gradient of Relu reads the output, so that the input may be overwritten or
// freed.
#include "ops/relu.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

OpDef relu_op() {
  OpDef op = unary_op<Relu, Numbers::kNumeric>("Relu");
  op.gradient = gradient_from_output("ReluGrad");
  op.examples = {unary_example(-1, 1)};
  return op;
}

template <typename F>
OpDef with_alpha(const char* name, double alpha) {
  OpDef op = unary_op<F>(name);
  op.gradient = gradient_from_input(std::string(name) + "Grad");
  op.examples = {unary_example(-1, 1, {{"alpha", alpha}}), unary_example(-2, 2)};
  op.examples[1].name = "default alpha";
  return op;
}

template <typename F>
OpDef grad(const char* name, Attributes attributes = {}) {
  OpDef op = unary_grad_op<F>(name);
  op.examples = {grad_example(-1, 1, std::move(attributes))};
  return op;
}

OpDef prelu_op() {
  OpDef op = binary_op<PRelu>("PRelu");
  op.inplace = {{0, 0}};
  op.gradient = [](GradientBuilder& g) {
    if (g.needs_grad(0)) {
      g.set_input_grad(0, g.op("PReluInputGrad", {g.input(0), g.input(1), g.output_grad(0)}));
    }
    if (g.needs_grad(1)) {
      g.set_input_grad(
          1, g.reduce_to(g.op("PReluSlopeGrad", {g.input(0), g.output_grad(0)}), g.input_shape(1)));
    }
  };
  OpExample example = unary_example(-1, 1);
  example.inputs = {{DType::kFloat32, {2, 6, 20}}, {DType::kFloat32, {6, 1}}};
  op.examples = {example};
  return op;
}

OpDef prelu_input_grad_op() {
  OpDef op = ternary_op<PReluInputGrad>("PReluInputGrad");
  op.inplace = {{0, 2}};
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{2}});
  };
  OpExample example = unary_example(-1, 1);
  example.inputs = {
      {DType::kFloat32, {2, 6, 20}}, {DType::kFloat32, {6, 1}}, {DType::kFloat32, {2, 6, 20}}};
  op.examples = {example};
  return op;
}

const RegisterOp kRelu{relu_op()};
const RegisterOp kReluGrad{grad<ReluGrad>("ReluGrad")};
const RegisterOp kLeakyRelu{with_alpha<LeakyRelu>("LeakyRelu", 0.2)};
const RegisterOp kLeakyReluGrad{grad<LeakyReluGrad>("LeakyReluGrad", {{"alpha", 0.2}})};
const RegisterOp kThresholdedRelu{with_alpha<ThresholdedRelu>("ThresholdedRelu", 0.25)};
const RegisterOp kThresholdedReluGrad{
    grad<ThresholdedReluGrad>("ThresholdedReluGrad", {{"alpha", 0.25}})};
const RegisterOp kPRelu{prelu_op()};
const RegisterOp kPReluInputGrad{prelu_input_grad_op()};
const RegisterOp kPReluSlopeGrad{grad<PReluSlopeGrad>("PReluSlopeGrad")};

}  // namespace

}  // namespace trainrt
