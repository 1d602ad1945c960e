// Tanh, Sigmoid and Erf. Gradients of the first two read the output: (1 - y^2) dy and y (1 - y) dy;
// d erf(x) = 2 / sqrt(pi) exp(-x^2).
#include "ops/tanh.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

template <typename F>
OpDef differentiable(const char* name, std::function<void(GradientBuilder&)> gradient) {
  OpDef op = unary_op<F>(name);
  op.gradient = std::move(gradient);
  op.examples = {unary_example(-4, 4)};
  return op;
}

template <typename F>
OpDef grad(const char* name) {
  OpDef op = unary_grad_op<F>(name);
  op.examples = {grad_example(-1, 1)};
  return op;
}

const RegisterOp kTanh{differentiable<Tanh>("Tanh", gradient_from_output("TanhGrad"))};
const RegisterOp kTanhGrad{grad<TanhGrad>("TanhGrad")};
const RegisterOp kSigmoid{differentiable<Sigmoid>("Sigmoid", gradient_from_output("SigmoidGrad"))};
const RegisterOp kSigmoidGrad{grad<SigmoidGrad>("SigmoidGrad")};
const RegisterOp kErf{differentiable<Erf>("Erf", gradient_from_input("ErfGrad"))};
const RegisterOp kErfGrad{grad<ErfGrad>("ErfGrad")};

}  // namespace

}  // namespace trainrt
