// Elu, Selu, Celu, Softplus, Softsign and Mish. Each gradient is one fused node that reads x.
//
// Mish: y = x tanh(softplus x); with t = tanh(softplus x): dy/dx = t + x (1 - t^2) sigmoid(x).
#include "ops/elu.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

template <typename F>
OpDef forward(const std::string& name, const Attributes& attributes = {}) {
  OpDef op = unary_op<F>(name);
  op.gradient = gradient_from_input(name + "Grad");
  op.examples = {unary_example(-3, 3)};
  if (!attributes.empty()) {
    op.examples.push_back(unary_example(-3, 3, attributes));
    op.examples.back().name = "own constants";
  }
  return op;
}

template <typename F>
OpDef grad(const char* name, Attributes attributes = {}) {
  OpDef op = unary_grad_op<F>(name);
  op.examples = {grad_example(-3, 3, std::move(attributes))};
  return op;
}

const RegisterOp kElu{forward<Elu>("Elu", {{"alpha", 1.5}})};
const RegisterOp kEluGrad{grad<EluGrad>("EluGrad", {{"alpha", 1.5}})};
const RegisterOp kSelu{forward<Selu>("Selu", {{"alpha", 1.5}, {"gamma", 1.1}})};
const RegisterOp kSeluGrad{grad<SeluGrad>("SeluGrad")};
const RegisterOp kCelu{forward<Celu>("Celu", {{"alpha", 1.5}})};
const RegisterOp kCeluGrad{grad<CeluGrad>("CeluGrad", {{"alpha", 1.5}})};
const RegisterOp kSoftplus{forward<Softplus>("Softplus")};
const RegisterOp kSoftplusGrad{grad<SoftplusGrad>("SoftplusGrad")};
const RegisterOp kSoftsign{forward<Softsign>("Softsign")};
const RegisterOp kSoftsignGrad{grad<SoftsignGrad>("SoftsignGrad")};
const RegisterOp kMish{forward<Mish>("Mish")};
const RegisterOp kMishGrad{grad<MishGrad>("MishGrad")};

}  // namespace

}  // namespace trainrt
