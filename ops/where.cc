// Where: y = condition ? a : b. The gradient selects too and never multiplies by the mask: under a
// mask of -infinity a product would be NaN.
//
// Selecting moves bits, so one loop per element size serves every type.
#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

template <typename Word, unsigned kRepeated>
void select(const bool* condition, const Word* a, const Word* b, Word* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const bool c = condition[kRepeated & 1 ? 0 : i];
    const Word x = a[kRepeated & 2 ? 0 : i];
    const Word y = b[kRepeated & 4 ? 0 : i];
    out[i] = c ? x : y;
  }
}

template <typename Word, unsigned kRepeated = 0>
void where_loop(
    const void* functor, const void* const* in, unsigned repeated, void* out, int64_t n) {
  if constexpr (kRepeated < 8) {
    if (repeated == kRepeated) {
      select<Word, kRepeated>(static_cast<const bool*>(in[0]),
                              static_cast<const Word*>(in[1]),
                              static_cast<const Word*>(in[2]),
                              static_cast<Word*>(out),
                              n);
    } else {
      where_loop<Word, kRepeated + 1>(functor, in, repeated, out, n);
    }
  }
}

void where_kernel(KernelContext& context) {
  switch (dtype_bytes(context.output_dtype(0))) {
    case 1:
      return elementwise::run_unconverted(context, where_loop<uint8_t>, nullptr);
    case 2:
      return elementwise::run_unconverted(context, where_loop<uint16_t>, nullptr);
    case 4:
      return elementwise::run_unconverted(context, where_loop<uint32_t>, nullptr);
    default:
      return elementwise::run_unconverted(context, where_loop<uint64_t>, nullptr);
  }
}

TensorTypes where_types(const OpContext& context) {
  TRAINRT_REQUIRE(
      context.num_inputs() == 3, kInvalidModel, "Where takes 3 inputs, got ", context.num_inputs());
  TRAINRT_REQUIRE(context.input_dtype(0) == DType::kBool,
                  kInvalidModel,
                  "the condition of Where must be bool, got ",
                  dtype_name(context.input_dtype(0)));
  TRAINRT_REQUIRE(context.input_dtype(1) == context.input_dtype(2),
                  kInvalidModel,
                  "the branches of Where must have one type, got ",
                  dtype_name(context.input_dtype(1)),
                  " and ",
                  dtype_name(context.input_dtype(2)));
  return {{context.input_dtype(1),
           broadcast_shapes(context.input_shape(0),
                            broadcast_shapes(context.input_shape(1), context.input_shape(2)))}};
}

void where_gradient(GradientBuilder& g) {
  const ValueId zero = g.scalar(0, g.dtype(g.output(0)));
  const ValueId condition = g.input(0), dy = g.output_grad(0);
  if (g.needs_grad(1)) {
    g.set_input_grad(1, g.reduce_to(g.where(condition, dy, zero), g.input_shape(1)));
  }
  if (g.needs_grad(2)) {
    g.set_input_grad(2, g.reduce_to(g.where(condition, zero, dy), g.input_shape(2)));
  }
}

OpDef where_op() {
  OpDef op;
  op.name = "Where";
  op.infer_types = where_types;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{1, 2}});
  };
  op.gradient = where_gradient;
  op.upgrade = [](UpgradeContext& context) { context.pass_through(); };
  op.inplace = {{0, 1}, {0, 2}};
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = where_kernel;
  const Tensor mask = Tensor::from<bool>({true, false, true, true, false, false}, {6, 1});
  OpExample equal;
  equal.name = "row mask";
  equal.inputs = {{DType::kBool, {6, 1}}, {DType::kFloat32, {6, 35}}, {DType::kFloat32, {6, 35}}};
  equal.values = {mask, {}, {}};
  OpExample scalar = equal;
  scalar.name = "masked fill";
  scalar.inputs[2].shape = {};
  op.examples = {equal, scalar};
  return op;
}

const RegisterOp kWhere{where_op()};

}  // namespace

}  // namespace trainrt
