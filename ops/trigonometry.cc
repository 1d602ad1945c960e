// Trigonometric and hyperbolic functions and their inverses. Each gradient is one fused node that
// reads x; the functions themselves are the C library's.
#include "ops/trigonometry.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

template <typename F>
OpDef function(const std::string& name, double low, double high) {
  OpDef op = unary_op<F>(name);
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 20); };
  op.gradient = gradient_from_input(name + "Grad");
  op.examples = {unary_example(low, high)};
  return op;
}

template <typename F>
OpDef grad(const std::string& name, double low, double high) {
  OpDef op = unary_grad_op<F>(name + "Grad");
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 20); };
  op.examples = {grad_example(low, high)};
  return op;
}

// Registers function and gradient, with examples from [low, high).
template <typename F, typename G>
struct RegisterFunction {
  RegisterFunction(const char* name, double low, double high)
      : forward(function<F>(name, low, high)), backward(grad<G>(name, low, high)) {}
  RegisterOp forward, backward;
};

const RegisterFunction<Sin, SinGrad> kSin{"Sin", -4, 4};
const RegisterFunction<Cos, CosGrad> kCos{"Cos", -4, 4};
const RegisterFunction<Tan, TanGrad> kTan{"Tan", -1, 1};
const RegisterFunction<Asin, AsinGrad> kAsin{"Asin", -0.9, 0.9};
const RegisterFunction<Acos, AcosGrad> kAcos{"Acos", -0.9, 0.9};
const RegisterFunction<Atan, AtanGrad> kAtan{"Atan", -4, 4};
const RegisterFunction<Sinh, SinhGrad> kSinh{"Sinh", -3, 3};
const RegisterFunction<Cosh, CoshGrad> kCosh{"Cosh", -3, 3};
const RegisterFunction<Asinh, AsinhGrad> kAsinh{"Asinh", -4, 4};
const RegisterFunction<Acosh, AcoshGrad> kAcosh{"Acosh", 1.2, 4};
const RegisterFunction<Atanh, AtanhGrad> kAtanh{"Atanh", -0.9, 0.9};

}  // namespace

}  // namespace trainrt
