// Exp, Log, Sqrt and Reciprocal, the functions whose gradient is an ordinary quotient or product:
// y = e^x: dx = y dy; y = log x: dx = dy / x; y = sqrt x: dx = dy / (2 y); y = 1 / x: dx = -y^2 dy.
#include "ops/exp.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

OpDef exp_op() {
  OpDef op = unary_op<Exp>("Exp");
  op.precision = PrecisionRule::kFull;  // grows out of 16 bits
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(0, g.mul(g.output_grad(0), g.output(0)));
  };
  op.examples = {unary_example(-3, 3)};
  return op;
}

OpDef log_op() {
  OpDef op = unary_op<Log>("Log");
  op.precision = PrecisionRule::kFull;
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(0, g.div(g.output_grad(0), g.input(0)));
  };
  op.examples = {unary_example(0.1, 4)};
  return op;
}

OpDef sqrt_op() {
  OpDef op = unary_op<Sqrt>("Sqrt");
  op.precision = PrecisionRule::kFull;
  op.gradient = gradient_from_output("SqrtGrad");
  op.examples = {unary_example(0.1, 4)};
  return op;
}

OpDef sqrt_grad_op() {
  OpDef op = unary_grad_op<SqrtGrad>("SqrtGrad");
  op.examples = {grad_example(0.3, 2)};
  return op;
}

OpDef reciprocal_op() {
  OpDef op = unary_op<Reciprocal>("Reciprocal");
  op.precision = PrecisionRule::kFull;
  op.gradient = gradient_from_output("ReciprocalGrad");
  op.examples = {unary_example(0.5, 2)};
  return op;
}

OpDef reciprocal_grad_op() {
  OpDef op = unary_grad_op<ReciprocalGrad>("ReciprocalGrad");
  op.examples = {grad_example(0.5, 2)};
  return op;
}

const RegisterOp kExp{exp_op()};
const RegisterOp kLog{log_op()};
const RegisterOp kSqrt{sqrt_op()};
const RegisterOp kSqrtGrad{sqrt_grad_op()};
const RegisterOp kReciprocal{reciprocal_op()};
const RegisterOp kReciprocalGrad{reciprocal_grad_op()};

}  // namespace

}  // namespace trainrt
