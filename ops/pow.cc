// Pow: y = x^e with broadcasting; the result has the type of x.
//
// dx = e x^(e-1) dy, and 0 where e = 0 (at x = 0 the formula would say 0 * infinity); de = y log(x)
// dy, and 0 where x = 0 and e >= 0. An exponent that is one number, as in x^2 of a norm, takes
// loops without a call to pow.
#include "ops/pow.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/convert.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

void pow_fast(KernelContext& context) {
  const DType dtype = context.input_dtype(0);
  const elementwise::Loop general =
      elementwise::select_loop<Pow, 2, Numbers::kNumeric>(context.node(), dtype, true);
  if (is_floating(dtype) && num_elements(context.input_shape(1)) == 1) {
    double exponent;
    convert_elements(context.input_dtype(1), context.raw_input(1), DType::kFloat64, &exponent, 1);
    const auto run = [&](auto functor) {
      using F = decltype(functor);
      elementwise::run(
          context,
          elementwise::select_loop<F, 2, Numbers::kFloating>(context.node(), dtype, true),
          &functor);
    };
    if (exponent == 2) {
      return run(Square{});
    }
    if (exponent == 3) {
      return run(Cube{});
    }
  }
  const Pow functor;
  elementwise::run(context, general, &functor);
}

void pow_gradient(GradientBuilder& g) {
  const ValueId x = g.input(0), e = g.input(1), dy = g.output_grad(0);
  if (g.needs_grad(0)) {
    const Value& exponent = g.graph().value(e);
    const bool known = exponent.kind == ValueKind::kConstant && exponent.constant.defined() &&
                       exponent.constant.num_elements() == 1;
    if (known && g.output_shape(0) == g.input_shape(0)) {
      const double value = exponent.constant.to_double()[0];
      g.set_input_grad(0, g.op("PowScalarGrad", {x, dy}, {{"exponent", value}}));
    } else {
      g.set_input_grad(0, g.reduce_to(g.op("PowInputGrad", {x, e, dy}), g.input_shape(0)));
    }
  }
  if (g.needs_grad(1)) {
    g.set_input_grad(1, g.reduce_to(g.op("PowExponentGrad", {x, e, dy}), g.input_shape(1)));
  }
}

OpDef pow_op() {
  OpDef op = binary_op<Pow, Numbers::kNumeric>("Pow");
  op.precision = PrecisionRule::kFull;
  op.cpu_kernel = pow_fast;
  op.inplace = {{0, 0}};
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 20); };
  op.gradient = pow_gradient;
  op.upgrade = [](UpgradeContext& context) {
    // Since opset 12 the exponent may have a type of its own.
    const ValueId x = context.input(0);
    context.set_outputs(context.emit("Pow", {x, context.cast(context.input(1), context.dtype(x))}));
  };
  op.examples = binary_examples(0.5, 2);
  for (const float exponent : {2.0f, 3.0f, 0.5f}) {
    OpExample example;
    example.name = concat("exponent ", exponent);
    example.inputs = {{DType::kFloat32, {6, 35}}, {DType::kFloat32, {}}};
    example.values = {{}, Tensor::scalar(exponent)};
    example.low = exponent == 0.5f ? 0.5 : -2;
    example.high = 2;
    example.check_gradient = {0};
    op.examples.push_back(example);
  }
  return op;
}

OpDef pow_scalar_grad_op() {
  OpDef op = unary_grad_op<PowScalarGrad>("PowScalarGrad");
  op.examples = {grad_example(0.5, 2, {{"exponent", 2.0}}),
                 grad_example(0.5, 2, {{"exponent", -0.5}})};
  op.examples[1].name = "inverse root";
  return op;
}

template <typename F>
OpDef ternary_grad(const char* name) {
  OpDef op = ternary_op<F>(name);
  op.inplace = {{0, 2}};
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{2}});
  };
  OpExample example = unary_example(0.5, 2);
  example.inputs = {
      {DType::kFloat32, {6, 20}}, {DType::kFloat32, {20}}, {DType::kFloat32, {6, 20}}};
  op.examples = {example};
  return op;
}

const RegisterOp kPow{pow_op()};
const RegisterOp kPowScalarGrad{pow_scalar_grad_op()};
const RegisterOp kPowInputGrad{ternary_grad<PowInputGrad>("PowInputGrad")};
const RegisterOp kPowExponentGrad{ternary_grad<PowExponentGrad>("PowExponentGrad")};

}  // namespace

}  // namespace trainrt
