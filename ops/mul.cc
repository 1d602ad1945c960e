// Mul and Div.
//
// d(a b) = b da + a db. For q = a / b: da = dq / b, db = -q dq / b, which needs no a.
#include "ops/mul.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/elementwise.h"
#include "ops/integer_division.h"

namespace trainrt {

namespace {

OpDef mul_op() {
  OpDef op = binary_op<Mul, Numbers::kNumeric>("Mul");
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{0}, {1}});
  };
  op.gradient = [](GradientBuilder& g) {
    for (int i = 0; i < 2; ++i) {
      if (g.needs_grad(i)) {
        g.set_input_grad(i, g.reduce_to(g.mul(g.output_grad(0), g.input(1 - i)), g.input_shape(i)));
      }
    }
  };
  op.examples = binary_examples(-1, 1);
  return op;
}

OpDef div_op() {
  OpDef op = binary_op<Div, Numbers::kNumeric>("Div");
  op.reference_kernel = without_zero_divisors(op.reference_kernel);
  op.cpu_kernel = without_zero_divisors(op.cpu_kernel);
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{0}});
  };
  op.gradient = [](GradientBuilder& g) {
    const ValueId quotient = g.div(g.output_grad(0), g.input(1));
    if (g.needs_grad(0)) {
      g.set_input_grad(0, g.reduce_to(quotient, g.input_shape(0)));
    }
    if (g.needs_grad(1)) {
      g.set_input_grad(1, g.neg(g.reduce_to(g.mul(quotient, g.output(0)), g.input_shape(1))));
    }
  };
  op.examples = binary_examples(0.5, 2);
  return op;
}

const RegisterOp kMul{mul_op()};
const RegisterOp kDiv{div_op()};

}  // namespace

}  // namespace trainrt
