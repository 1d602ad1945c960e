// HardSigmoid: y = clip(alpha x + beta, 0, 1), HardSwish: y = x clip(x / 6 + 1/2, 0, 1), and
// Shrink: x + bias below -lambd, x - bias above lambd, 0 between.
#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

struct HardSigmoidConstants {
  explicit HardSigmoidConstants(const Attributes& attributes)
      : alpha(attributes.get_float("alpha", 0.2)), beta(attributes.get_float("beta", 0.5)) {}
  double alpha, beta;
};

struct HardSigmoid : HardSigmoidConstants {
  using HardSigmoidConstants::HardSigmoidConstants;
  template <typename T>
  T operator()(T x) const {
    const T line = T(alpha) * x + T(beta);
    return line < T(0) ? T(0) : line > T(1) ? T(1) : line;
  }
};

struct HardSigmoidGrad : HardSigmoidConstants {
  using HardSigmoidConstants::HardSigmoidConstants;
  template <typename T>
  T operator()(T x, T dy) const {
    const T line = T(alpha) * x + T(beta);
    return line > T(0) && line < T(1) ? T(alpha) * dy : T(0);
  }
};

struct HardSwish {
  template <typename T>
  T operator()(T x) const {
    const T line = x / T(6) + T(0.5);
    return x * (line < T(0) ? T(0) : line > T(1) ? T(1) : line);
  }
};

struct HardSwishGrad {
  template <typename T>
  T operator()(T x, T dy) const {
    return x < T(-3) ? T(0) : x > T(3) ? dy : dy * (x / T(3) + T(0.5));
  }
};

struct ShrinkConstants {
  explicit ShrinkConstants(const Attributes& attributes)
      : bias(attributes.get_float("bias", 0.0)), lambd(attributes.get_float("lambd", 0.5)) {}
  double bias, lambd;
};

struct Shrink : ShrinkConstants {
  using ShrinkConstants::ShrinkConstants;
  template <typename T>
  T operator()(T x) const {
    // In double for integers too: bias and lambd need not be whole.
    const double value = static_cast<double>(x);
    return value < -lambd  ? static_cast<T>(value + bias)
           : value > lambd ? static_cast<T>(value - bias)
                           : T(0);
  }
};

struct ShrinkGrad : ShrinkConstants {
  using ShrinkConstants::ShrinkConstants;
  template <typename T>
  T operator()(T x, T dy) const {
    return x < T(-lambd) || x > T(lambd) ? dy : T(0);
  }
};

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
