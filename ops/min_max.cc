// Min and Max of two operands (ONNX's variadic forms become chains). NaN wins. At a tie each
// operand takes half of the gradient: giving all of it to both makes 16-bit training diverge.
#include "ops/min_max.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

void upgrade_variadic(UpgradeContext& context) {
  const int n = context.num_inputs();
  ValueId result = context.input(0);
  for (int i = 1; i + 1 < n; ++i) {
    result = context.op(context.op_type(), {result, context.input(i)});
  }
  context.set_outputs(n == 1 ? context.emit("Identity", {result})
                             : context.emit(context.op_type(), {result, context.input(n - 1)}));
}

template <typename F>
OpDef forward(const std::string& name) {
  OpDef op = binary_op<F, Numbers::kNumeric>(name);
  op.upgrade = upgrade_variadic;
  op.gradient = [grad = name + "Grad"](GradientBuilder& g) {
    for (int i = 0; i < 2; ++i) {
      if (g.needs_grad(i)) {
        const ValueId full = g.op(grad, {g.input(i), g.input(1 - i), g.output_grad(0)});
        g.set_input_grad(i, g.reduce_to(full, g.input_shape(i)));
      }
    }
  };
  op.examples = binary_examples(-1, 1);
  return op;
}

template <typename F>
OpDef grad(const char* name) {
  OpDef op = ternary_op<F>(name);
  op.inplace = {{0, 2}};
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{2}});
  };
  OpExample example = unary_example(-1, 1);
  example.inputs = {
      {DType::kFloat32, {6, 20}}, {DType::kFloat32, {20}}, {DType::kFloat32, {6, 20}}};
  op.examples = {example};
  return op;
}

const RegisterOp kMin{forward<Min>("Min")};
const RegisterOp kMax{forward<Max>("Max")};
const RegisterOp kMinGrad{grad<MinGrad>("MinGrad")};
const RegisterOp kMaxGrad{grad<MaxGrad>("MaxGrad")};

}  // namespace

}  // namespace trainrt
