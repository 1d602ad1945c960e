// Expand: repeats dims of size 1. ONNX's Tile becomes Expand between two Reshapes: a dim d repeated
// r times is [1, d] expanded to [r, d].
#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/localize.h"
#include "ops/strided_copy.h"

namespace trainrt {

namespace {

void expand_kernel(KernelContext& context) {
  const Shape& out = context.output_shape(0);
  strided_copy(context,
               dtype_bytes(context.output_dtype(0)),
               out,
               {context.raw_output(0), row_major_strides(out)},
               {context.raw_input(0), broadcast_strides(context.input_shape(0), out)});
}

TensorTypes expand_types(const OpContext& op) {
  const Shape& shape = op.attributes().get_ints("shape");
  TRAINRT_REQUIRE(broadcast_shapes(op.input_shape(0), shape) == shape,
                  kInvalidModel,
                  "cannot expand ",
                  shape_string(op.input_shape(0)),
                  " to ",
                  shape_string(shape));
  return {{op.input_dtype(0), shape}};
}

void upgrade_expand(UpgradeContext& context) {
  const Shape shape = broadcast_shapes(context.shape(context.input(0)), context.int_input(1));
  context.set_outputs(context.emit("Expand", {context.input(0)}, {{"shape", shape}}));
}

void upgrade_tile(UpgradeContext& context) {
  const Shape from = context.shape(context.input(0));
  const std::vector<int64_t> repeats = context.int_input(1);
  if (repeats.size() != from.size()) {
    context.fail(concat("got ", repeats.size(), " repeats for ", shape_string(from)));
  }
  Shape split, expanded, tiled;
  for (size_t d = 0; d < from.size(); ++d) {
    split.insert(split.end(), {1, from[d]});
    expanded.insert(expanded.end(), {repeats[d], from[d]});
    tiled.push_back(repeats[d] * from[d]);
  }
  const ValueId copies =
      context.expand(context.reshape(context.input(0), std::move(split)), std::move(expanded));
  context.set_outputs(context.emit("Reshape", {copies}, {{"shape", tiled}}));
}

OpExample example(std::string name, Shape from, Shape to) {
  OpExample expand;
  expand.name = std::move(name);
  expand.attributes = {{"shape", std::move(to)}};
  expand.inputs = {{DType::kFloat32, std::move(from)}};
  return expand;
}

OpDef expand_op() {
  OpDef op;
  op.name = "Expand";
  op.infer_types = expand_types;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{0}});
  };
  op.localize = [](const OpContext& context, const FactorShard& shard) {
    return localize_output_shape(context, shard, "shape");
  };
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(0, g.reduce_to(g.output_grad(0), g.input_shape(0)));
  };
  op.upgrade = upgrade_expand;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = expand_kernel;
  op.examples = {example("scalar", {}, {6, 4}),
                 example("leading dims", {35}, {2, 6, 35}),
                 example("last dim", {4, 6, 1}, {4, 6, 20}),
                 example("middle dim", {4, 1, 6}, {4, 6, 6})};
  return op;
}

const RegisterOp kExpand{expand_op()};
const RegisterUpgrade kTile{"Tile", upgrade_tile};

}  // namespace

}  // namespace trainrt
