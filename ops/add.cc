// Add, Sub, and ONNX's variadic Sum and Mean, which become chains of Add.
#include "ops/add.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

ShardingRule sum_sharding(const OpContext& op) {
  return Factors::elementwise(op).linear({{0, 1}});
}

OpDef add_op() {
  OpDef op = binary_op<Add, Numbers::kNumeric>("Add");
  op.sharding = sum_sharding;
  op.gradient = [](GradientBuilder& g) {
    for (int i = 0; i < 2; ++i) {
      if (g.needs_grad(i)) {
        g.set_input_grad(i, g.reduce_to(g.output_grad(0), g.input_shape(i)));
      }
    }
  };
  op.examples = binary_examples(-1, 1);
  return op;
}

OpDef sub_op() {
  OpDef op = binary_op<Sub, Numbers::kNumeric>("Sub");
  op.sharding = sum_sharding;
  op.gradient = [](GradientBuilder& g) {
    if (g.needs_grad(0)) {
      g.set_input_grad(0, g.reduce_to(g.output_grad(0), g.input_shape(0)));
    }
    if (g.needs_grad(1)) {  // negated after the sum: the smaller tensor
      g.set_input_grad(1, g.neg(g.reduce_to(g.output_grad(0), g.input_shape(1))));
    }
  };
  op.examples = binary_examples(-1, 1);
  return op;
}

// The last node keeps the ONNX node's name.
void upgrade_variadic(UpgradeContext& context) {
  const int n = context.num_inputs();
  const bool mean = context.op_type() == "Mean";
  ValueId sum = context.input(0);
  for (int i = 1; i + 1 < n; ++i) {
    sum = context.add(sum, context.input(i));
  }
  if (n == 1) {
    context.set_outputs(context.emit("Identity", {sum}));
  } else if (!mean) {
    context.set_outputs(context.emit("Add", {sum, context.input(n - 1)}));
  } else {
    sum = context.add(sum, context.input(n - 1));
    context.set_outputs(
        context.emit("Div", {sum, context.scalar(static_cast<double>(n), context.dtype(sum))}));
  }
}

const RegisterOp kAdd{add_op()};
const RegisterOp kSub{sub_op()};
const RegisterUpgrade kSum{"Sum", upgrade_variadic};
const RegisterUpgrade kMean{"Mean", upgrade_variadic};

}  // namespace

}  // namespace trainrt
