// Neg, Abs and Sign. At 0 the derivative of Abs is 0, as in PyTorch.
#include "ops/neg.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

OpDef neg_op() {
  OpDef op = unary_op<Neg, Numbers::kNumeric>("Neg");
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{0}});
  };
  op.gradient = [](GradientBuilder& g) { g.set_input_grad(0, g.neg(g.output_grad(0))); };
  op.examples = {unary_example(-1, 1)};
  return op;
}

OpDef abs_op() {
  OpDef op = unary_op<Abs, Numbers::kNumeric>("Abs");
  op.gradient = gradient_from_input("AbsGrad");
  op.examples = {unary_example(-1, 1)};
  return op;
}

OpDef abs_grad_op() {
  OpDef op = unary_grad_op<AbsGrad>("AbsGrad");
  op.examples = {grad_example(-1, 1)};
  return op;
}

OpDef sign_op() {
  OpDef op = unary_op<Sign, Numbers::kNumeric>("Sign");
  op.not_differentiable = true;  // its derivative is 0 wherever there is one
  op.examples = {unary_example(-1, 1)};
  return op;
}

const RegisterOp kNeg{neg_op()};
const RegisterOp kAbs{abs_op()};
const RegisterOp kAbsGrad{abs_grad_op()};
const RegisterOp kSign{sign_op()};

}  // namespace

}  // namespace trainrt
