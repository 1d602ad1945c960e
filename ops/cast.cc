// Cast and CastLike. The gradient casts back; integers and booleans stop it.
//
// A cast is taken for linear (a partial sum may be cast before it is reduced) unless it narrows:
// rounding the terms of a sum loses more than rounding the sum.
#include "graph/autodiff.h"
#include "graph/fused_elementwise.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/convert.h"
#include "ops/elementwise.h"
#include "ops/onnx_dtype.h"

namespace trainrt {

namespace {

constexpr int64_t kGrain = 1 << 15;

void cast_kernel(KernelContext& context) {
  const DType from = context.input_dtype(0), to = context.output_dtype(0);
  const std::byte* in = static_cast<const std::byte*>(context.raw_input(0));
  std::byte* out = static_cast<std::byte*>(context.raw_output(0));
  context.parallel_for(
      num_elements(context.output_shape(0)), kGrain, [&](int64_t begin, int64_t end) {
        convert_elements(
            from, in + begin * dtype_bytes(from), to, out + begin * dtype_bytes(to), end - begin);
      });
}

void upgrade_cast(UpgradeContext& context) {
  const DType to = context.op_type() == "CastLike"
                       ? context.dtype(context.input(1))
                       : dtype_from_onnx(context.attributes().get_int("to"));
  context.set_outputs(
      context.emit("Cast", {context.input(0)}, {{"to", std::string(dtype_name(to))}}));
}

OpDef cast_op() {
  OpDef op;
  op.name = "Cast";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    return {{dtype_attribute(context.attributes().get_string("to")), context.input_shape(0)}};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    const DType from = context.input_dtype(0), to = context.output_type(0).dtype;
    Factors factors = Factors::elementwise(context);
    if (is_floating(from) && is_floating(to) && dtype_bytes(to) >= dtype_bytes(from)) {
      factors.linear({{0}});
    }
    return factors;
  };
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(0, g.cast(g.output_grad(0), g.dtype(g.input(0))));
  };
  op.upgrade = upgrade_cast;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;  // reads what there is; the result is what it says
  op.reference_kernel = cast_kernel;
  for (const auto& [from, to] : {std::pair{DType::kFloat32, DType::kFloat64},
                                 std::pair{DType::kFloat32, DType::kBFloat16},
                                 std::pair{DType::kFloat16, DType::kFloat32},
                                 std::pair{DType::kFloat32, DType::kInt64},
                                 std::pair{DType::kInt64, DType::kFloat32}}) {
    OpExample example = unary_example(-3, 3, {{"to", std::string(dtype_name(to))}});
    example.name = concat(dtype_name(from), " to ", dtype_name(to));
    example.inputs[0].dtype = from;
    op.examples.push_back(example);
  }
  return op;
}

const RegisterOp kCast{cast_op()};
const RegisterElementwise kCastElementwise{"Cast"};
const RegisterUpgrade kCastLike{"CastLike", upgrade_cast};

}  // namespace

}  // namespace trainrt
