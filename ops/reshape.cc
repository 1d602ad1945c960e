// Reshape, and ONNX's Flatten, Squeeze and Unsqueeze, which are reshapes once dims are known.
//
// Sharding: both shapes are read major first and cut into common factors (the greatest common
// divisor of what is left of the current dims), so that [b s, h] -> [b, s, h] says that b and s are
// factors. From the first pair of dims without a common divisor to the end of their group (where
// the products agree again) nothing can be sharded.
#include <algorithm>
#include <numeric>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/localize.h"
#include "ops/strided_copy.h"

namespace trainrt {

namespace {

ShardingRule reshape_sharding(const OpContext& op) {
  const Shape& from = op.input_shape(0);
  const Shape& to = op.output_shape(0);
  ShardingRule rule;
  rule.linear = {{0}};
  TensorFactors in(from.size()), out(to.size());
  const auto add_factor = [&rule](int64_t size, FactorKind kind) {
    rule.factors.push_back({concat("f", rule.factors.size()), size, kind});
    return static_cast<int>(rule.factors.size()) - 1;
  };
  size_t i = 0, o = 0;
  int64_t left_in = 1, left_out = 1;  // what is left of dims i - 1 and o - 1
  int64_t product_in = 1, product_out = 1;
  bool aligned = num_elements(from) > 0;
  while (aligned && (left_in > 1 || left_out > 1 || i < from.size() || o < to.size())) {
    // A side with nothing left takes its next dim.
    if (left_in == 1 && i < from.size()) {
      left_in = from[i++];
      product_in *= left_in;
      continue;
    }
    if (left_out == 1 && o < to.size()) {
      left_out = to[o++];
      product_out *= left_out;
      continue;
    }
    const int64_t common = std::gcd(left_in, left_out);
    if (common > 1) {
      const int factor = add_factor(common, FactorKind::kParallel);
      in[i - 1].push_back(factor);
      out[o - 1].push_back(factor);
      left_in /= common;
      left_out /= common;
      continue;
    }
    // The rest of the group is whole: take dims until the products agree.
    if (left_in > 1) {
      in[i - 1].push_back(add_factor(left_in, FactorKind::kWhole));
    }
    if (left_out > 1) {
      out[o - 1].push_back(add_factor(left_out, FactorKind::kWhole));
    }
    while (product_in != product_out) {
      const bool behind = product_in < product_out;
      const int64_t size = behind ? from[i] : to[o];
      (behind ? product_in : product_out) *= size;
      if (size > 1) {
        (behind ? in[i] : out[o]).push_back(add_factor(size, FactorKind::kWhole));
      }
      ++(behind ? i : o);
    }
    left_in = left_out = 1;
  }
  rule.inputs = {in};
  rule.outputs = {out};
  return rule;
}

TensorTypes reshape_types(const OpContext& op) {
  const Shape& shape = op.attributes().get_ints("shape");
  TRAINRT_REQUIRE(num_elements(shape) == op.num_elements(0),
                  kInvalidModel,
                  "cannot reshape ",
                  shape_string(op.input_shape(0)),
                  " to ",
                  shape_string(shape),
                  ": the number of elements differs");
  return {{op.input_dtype(0), shape}};
}

void emit_reshape(UpgradeContext& context, Shape shape) {
  context.set_outputs(context.emit("Reshape", {context.input(0)}, {{"shape", std::move(shape)}}));
}

void upgrade_reshape(UpgradeContext& context) {
  const Shape& from = context.shape(context.input(0));
  Shape shape = context.opset() < 5 ? context.attributes().get_ints("shape") : context.int_input(1);
  const bool allow_zero = context.attributes().get_int("allowzero", 0) != 0;
  int unknown = -1;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] == 0 && !allow_zero) {
      if (d >= from.size()) {
        context.fail(concat("dim ",
                            d,
                            " of the new shape copies a dim that the input ",
                            shape_string(from),
                            " does not have"));
      }
      shape[d] = from[d];
    }
    if (shape[d] == -1) {
      TRAINRT_REQUIRE(unknown < 0,
                      kInvalidModel,
                      "the new shape ",
                      shape_string(shape),
                      " leaves more than one dim open (-1)");
      unknown = static_cast<int>(d);
    }
  }
  if (unknown >= 0) {
    const int64_t total = num_elements(from);
    Shape others = shape;
    others[static_cast<size_t>(unknown)] = 1;
    const int64_t known = num_elements(others);
    TRAINRT_REQUIRE(known != 0 && total % known == 0,
                    kInvalidModel,
                    "cannot reshape ",
                    shape_string(from),
                    " to ",
                    shape_string(shape));
    shape[static_cast<size_t>(unknown)] = total / known;
  }
  emit_reshape(context, std::move(shape));
}

void upgrade_flatten(UpgradeContext& context) {
  const Shape& from = context.shape(context.input(0));
  const int ndim = static_cast<int>(from.size());
  int64_t axis = context.attributes().get_int("axis", 1);
  axis += axis < 0 ? ndim : 0;
  if (axis < 0 || axis > ndim) {
    context.fail(concat("axis ", axis, " is outside of ", shape_string(from)));
  }
  const int cut = static_cast<int>(axis);
  emit_reshape(context, {dims_product(from, 0, cut), dims_product(from, cut, ndim)});
}

// The axes of Squeeze and Unsqueeze: an attribute before opset 13, then an input.
std::vector<int64_t> squeeze_axes(const UpgradeContext& context, const Attributes& attributes) {
  return context.has_input(1) ? context.int_input(1) : attributes.get_ints("axes", {});
}

void upgrade_squeeze(UpgradeContext& context) {
  const Shape& from = context.shape(context.input(0));
  const std::vector<int64_t> axes = squeeze_axes(context, context.attributes());
  const bool all = !context.has_input(1) && !context.attributes().has("axes");
  std::vector<bool> drop(from.size(), false);
  for (size_t d = 0; all && d < from.size(); ++d) {
    drop[d] = from[d] == 1;
  }
  for (const int64_t axis : axes) {
    const size_t d = static_cast<size_t>(normalize_axis(axis, static_cast<int>(from.size())));
    if (from[d] != 1) {
      context.fail(concat("axis ", axis, " of ", shape_string(from), " is not of size 1"));
    }
    drop[d] = true;
  }
  Shape shape;
  for (size_t d = 0; d < from.size(); ++d) {
    if (!drop[d]) {
      shape.push_back(from[d]);
    }
  }
  emit_reshape(context, std::move(shape));
}

void upgrade_unsqueeze(UpgradeContext& context) {
  const Shape& from = context.shape(context.input(0));
  const std::vector<int64_t> axes = squeeze_axes(context, context.attributes());
  const size_t ndim = from.size() + axes.size();
  std::vector<bool> inserted(ndim, false);
  for (const int64_t axis : axes) {
    const size_t d = static_cast<size_t>(normalize_axis(axis, static_cast<int>(ndim)));
    if (inserted[d]) {
      context.fail(concat("axis ", axis, " is given twice"));
    }
    inserted[d] = true;
  }
  Shape shape;
  size_t next = 0;
  for (size_t d = 0; d < ndim; ++d) {
    shape.push_back(inserted[d] ? 1 : from[next++]);
  }
  emit_reshape(context, std::move(shape));
}

OpExample example(std::string name, Shape from, Shape to) {
  OpExample reshape;
  reshape.name = std::move(name);
  reshape.attributes = {{"shape", std::move(to)}};
  reshape.inputs = {{DType::kFloat32, std::move(from)}};
  return reshape;
}

OpDef reshape_op() {
  OpDef op;
  op.name = "Reshape";
  op.infer_types = reshape_types;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = reshape_sharding;
  op.localize = [](const OpContext& context, const FactorShard& shard) {
    return localize_output_shape(context, shard, "shape");
  };
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(0, g.reshape(g.output_grad(0), g.input_shape(0)));
  };
  op.upgrade = upgrade_reshape;
  op.inplace = {{0, 0}};
  op.view = true;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = copy_kernel;
  op.examples = {example("split a dim", {24, 6}, {4, 6, 6}),
                 example("merge dims", {4, 6, 5}, {24, 5}),
                 example("split heads", {2, 6, 24}, {2, 6, 4, 6}),
                 example("no common factor", {3, 4}, {4, 3}),
                 example("common divisor", {6, 4}, {4, 6}),
                 example("dims of size 1", {6, 1, 4}, {1, 6, 4, 1})};
  return op;
}

const RegisterOp kReshape{reshape_op()};
const RegisterUpgrade kFlatten{"Flatten", upgrade_flatten};
const RegisterUpgrade kSqueeze{"Squeeze", upgrade_squeeze};
const RegisterUpgrade kUnsqueeze{"Unsqueeze", upgrade_unsqueeze};

}  // namespace

}  // namespace trainrt
