// Elu, Selu, Celu, Softplus, Softsign and Mish. Each gradient is one fused node that reads x.
//
// Mish: y = x tanh(softplus x); with t = tanh(softplus x): dy/dx = t + x (1 - t^2) sigmoid(x).
#include <cmath>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/elementwise.h"
#include "ops/vector_math.h"

namespace trainrt {

namespace {

struct Elu {
  explicit Elu(const Attributes& attributes) : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  T operator()(T x) const {
    return x < T(0) ? T(alpha) * vmath::expm1(x) : x;
  }
  double alpha;
};

struct EluGrad {
  explicit EluGrad(const Attributes& attributes) : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  T operator()(T x, T dy) const {
    return x < T(0) ? dy * T(alpha) * vmath::exp(x) : dy;
  }
  double alpha;
};

// The defaults of Selu: Klambauer et al., "Self-Normalizing Neural Networks", as ONNX rounds them.
struct SeluConstants {
  explicit SeluConstants(const Attributes& attributes)
      : alpha(attributes.get_float("alpha", 1.67326319217681884765625)),
        gamma(attributes.get_float("gamma", 1.05070102214813232421875)) {}
  double alpha, gamma;
};

struct Selu : SeluConstants {
  using SeluConstants::SeluConstants;
  template <typename T>
  T operator()(T x) const {
    return T(gamma) * (x > T(0) ? x : T(alpha) * vmath::expm1(x));
  }
};

struct SeluGrad : SeluConstants {
  using SeluConstants::SeluConstants;
  template <typename T>
  T operator()(T x, T dy) const {
    return T(gamma) * dy * (x > T(0) ? T(1) : T(alpha) * vmath::exp(x));
  }
};

struct Celu {
  explicit Celu(const Attributes& attributes) : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  T operator()(T x) const {
    return x < T(0) ? T(alpha) * vmath::expm1(x / T(alpha)) : x;
  }
  double alpha;
};

struct CeluGrad {
  explicit CeluGrad(const Attributes& attributes) : alpha(attributes.get_float("alpha", 1.0)) {}
  template <typename T>
  T operator()(T x, T dy) const {
    return x < T(0) ? dy * vmath::exp(x / T(alpha)) : dy;
  }
  double alpha;
};

struct Softplus {
  template <typename T>
  T operator()(T x) const {
    return vmath::softplus(x);
  }
};

struct SoftplusGrad {
  template <typename T>
  T operator()(T x, T dy) const {
    return dy * vmath::sigmoid(x);
  }
};

struct Softsign {
  template <typename T>
  T operator()(T x) const {
    return x / (T(1) + std::fabs(x));
  }
};

struct SoftsignGrad {
  template <typename T>
  T operator()(T x, T dy) const {
    const T d = T(1) + std::fabs(x);
    return dy / (d * d);
  }
};

struct Mish {
  template <typename T>
  T operator()(T x) const {
    return x * vmath::tanh(vmath::softplus(x));
  }
};

struct MishGrad {
  template <typename T>
  T operator()(T x, T dy) const {
    const T t = vmath::tanh(vmath::softplus(x));
    return dy * (t + x * (T(1) - t * t) * vmath::sigmoid(x));
  }
};

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
