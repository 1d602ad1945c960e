// Mod: the remainder with the sign of the divisor (fmod = 0, as in Python) or of the dividend (fmod
// = 1, as in C), and BitShift, which becomes ShiftLeft or ShiftRight.
//
// r = a - b k with k = floor(a / b) or trunc(a / b), locally constant: da = dr, db = -k dr.
#include "ops/mod.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"
#include "ops/integer_division.h"

namespace trainrt {

namespace {

OpDef mod_op() {
  OpDef op = binary_op<Mod, Numbers::kNumeric>("Mod");
  op.reference_kernel = without_zero_divisors(op.reference_kernel);
  op.cpu_kernel = without_zero_divisors(op.cpu_kernel);
  op.gradient = [](GradientBuilder& g) {
    if (g.needs_grad(0)) {
      g.set_input_grad(0, g.reduce_to(g.output_grad(0), g.input_shape(0)));
    }
    if (g.needs_grad(1)) {
      const ValueId full =
          g.op("ModDivisorGrad", {g.input(0), g.input(1), g.output_grad(0)}, g.attributes());
      g.set_input_grad(1, g.reduce_to(full, g.input_shape(1)));
    }
  };
  op.examples = binary_examples(0.5, 2);
  OpExample c_style;
  c_style.name = "C style";
  c_style.attributes = {{"fmod", int64_t{1}}};
  c_style.inputs = {{DType::kFloat32, {6, 9}}, {DType::kFloat32, {6, 1}}};
  c_style.values = {{}, Tensor::from<float>({0.3f, -0.3f, 0.7f, -0.7f, 0.2f, 0.9f}, {6, 1})};
  c_style.check_gradient = {0, 1};
  op.examples.push_back(c_style);
  return op;
}

OpDef mod_divisor_grad_op() {
  OpDef op = ternary_op<ModDivisorGrad>("ModDivisorGrad");
  op.inplace = {{0, 2}};
  OpExample example = unary_example(0.5, 2);
  example.inputs = {
      {DType::kFloat32, {6, 20}}, {DType::kFloat32, {20}}, {DType::kFloat32, {6, 20}}};
  op.examples = {example};
  return op;
}

template <typename F>
OpDef shift_op(const char* name) {
  OpDef op = binary_op<F, Numbers::kNumeric>(name);
  op.upgrade = nullptr;
  op.not_differentiable = true;
  OpExample example;
  example.name = "matrix";
  example.inputs = {{DType::kUInt8, {6, 9}}, {DType::kUInt8, {9}}};
  op.examples = {example};
  return op;
}

const RegisterOp kMod{mod_op()};
const RegisterOp kModDivisorGrad{mod_divisor_grad_op()};
const RegisterOp kShiftLeft{shift_op<ShiftLeft>("ShiftLeft")};
const RegisterOp kShiftRight{shift_op<ShiftRight>("ShiftRight")};
const RegisterUpgrade kBitShift{
    "BitShift", [](UpgradeContext& context) {
      const bool left = context.attributes().get_string("direction") == "LEFT";
      context.set_outputs(context.emit(left ? "ShiftLeft" : "ShiftRight", context.inputs()));
    }};

}  // namespace

}  // namespace trainrt
