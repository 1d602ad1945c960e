// HardSigmoid: y = clip(alpha x + beta, 0, 1), HardSwish: y = x clip(x / 6 + 1/2, 0, 1), and
// Shrink: x + bias below -lambd, x - bias above lambd, 0 between.
#include "ops/hard_sigmoid.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

template <typename F, Numbers kNumbers = Numbers::kFloating>
OpDef forward(const std::string& name, Attributes attributes = {}) {
  OpDef op = unary_op<F, kNumbers>(name);
  op.gradient = gradient_from_input(name + "Grad");
  op.examples = {unary_example(-4, 4, std::move(attributes))};
  return op;
}

template <typename F>
OpDef grad(const char* name, Attributes attributes = {}) {
  OpDef op = unary_grad_op<F>(name);
  op.examples = {grad_example(-4, 4, std::move(attributes))};
  return op;
}

const Attributes kShrinkExample{{"bias", 1.5}, {"lambd", 1.5}};

const RegisterOp kHardSigmoid{forward<HardSigmoid>("HardSigmoid")};
const RegisterOp kHardSigmoidGrad{grad<HardSigmoidGrad>("HardSigmoidGrad")};
const RegisterOp kHardSwish{forward<HardSwish>("HardSwish")};
const RegisterOp kHardSwishGrad{grad<HardSwishGrad>("HardSwishGrad")};
const RegisterOp kShrink{forward<Shrink, Numbers::kNumeric>("Shrink", kShrinkExample)};
const RegisterOp kShrinkGrad{grad<ShrinkGrad>("ShrinkGrad", kShrinkExample)};

}  // namespace

}  // namespace trainrt
