// Neg, Abs and Sign. At 0 the derivative of Abs is 0, as in PyTorch.
#include <type_traits>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

struct Neg {
  template <typename T>
  T operator()(T x) const {
    return T(0) - x;  // wraps for unsigned integers
  }
  double operator()(double x) const { return -x; }
  float operator()(float x) const { return -x; }
};

struct Abs {
  template <typename T>
  T operator()(T x) const {
    if constexpr (std::is_unsigned_v<T>) {
      return x;
    } else {
      return x < T(0) ? T(0) - x : T(0) + x;  // + 0 turns -0 into 0
    }
  }
};

struct Sign {
  template <typename T>
  T operator()(T x) const {
    return x > T(0) ? T(1) : x < T(0) ? T(0) - T(1) : x;  // zeros and NaN stay
  }
};

struct AbsGrad {
  template <typename T>
  T operator()(T x, T dy) const {
    return x > T(0) ? dy : x < T(0) ? -dy : T(0);
  }
};

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
