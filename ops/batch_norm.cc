// BatchNormalization in pieces, cut where ranks that normalize together must exchange sums:
//
//   BatchNormMoments(x)                                    -> [2, c] float64: sum x, sum x^2
//   BatchNormApply(x, moments, scale, bias[, residual])    -> y = (x - mean) inv_std scale + bias
//   BatchNormStatistics(moments)                           -> mean, var (population)
//   BatchNormGradSums(dy, x, moments[, scale, bias])       -> [2, c] float64: sum dy, sum dy h
//   BatchNormInputGrad(dy, x, scale, moments, sums[, bias]) -> dx
//   BatchNormParameterGrad(sums)                           -> dscale, dbias
//   BatchNormFixedMoments(mean, var)                       -> moments with count 1 (inference)
//   BatchNormMomentsGrad(sums, moments, scale)             -> dmoments, when they are fixed
//   RunningAverage(running, batch)                         -> running m + batch (1 - m)
//
// `count` is the number of elements behind the moments, over all ranks that share them. Splitting
// samples makes moments and sums partial: summing them is synchronised BatchNorm, leaving them is
// the local one. Raw moments in float64 lose nothing that float32 data had unless |mean| is 10^4
// standard deviations. `fixed` = 1 (inference form): moments are given, so dx = dy scale inv_std.
//
// A ReLU behind it, and a residual added in between, are fused into BatchNormApply: `relu` = 1, y =
// relu(... + residual). Its gradient without a residual knows from x what passed the ReLU (`relu` =
// 1, with scale and bias), so y need not be kept for it.
//
// ONNX's running variance takes the population variance of the batch, as its text says; PyTorch
// stores the unbiased one. Opset 7 to 13 tell training by the number of outputs, later ones by
// training_mode; momentum is the weight of the old value.
#include "ops/batch_norm.h"

#include "graph/autodiff.h"
#include "graph/passes/fusion.h"
#include "graph/passes/layout.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"
#include "ops/onnx_dtype.h"
#include "ops/rows.h"
#include "ops/running_average.h"
#include "ops/spatial.h"

namespace trainrt {

namespace {

// ---- description -----------------------------------------------------------------------------

TensorTypes infer_sums(const OpContext& op) {
  require_real(op);
  const bool last = op.attributes().get_string("layout", "nchw") == "nhwc";
  return {{DType::kFloat64, {2, image_shape(op.input_shape(0), last).c}}};
}

TensorTypes infer_apply(const OpContext& op) {
  const int64_t c = infer_sums(op)[0].shape[1];
  for (int i = 2; i < 4; ++i) {
    TRAINRT_REQUIRE(op.input_type(i) == (TensorType{op.input_dtype(0), {c}}),
                    kInvalidModel,
                    "BatchNormalization: ",
                    i == 2 ? "scale" : "bias",
                    " is ",
                    dtype_name(op.input_dtype(i)),
                    shape_string(op.input_shape(i)),
                    ", wanted ",
                    dtype_name(op.input_dtype(0)),
                    "[",
                    c,
                    "]");
  }
  TRAINRT_REQUIRE(!op.has_input(4) || op.input_type(4) == op.input_type(0),
                  kInvalidModel,
                  "BatchNormalization: the residual is ",
                  shape_string(op.input_shape(4)),
                  ", wanted ",
                  shape_string(op.input_shape(0)));
  return {op.input_type(0)};
}

TensorTypes infer_from_moments(const OpContext& op) {
  const TensorType type{dtype_attribute(op.attributes().get_string("dtype")),
                        {op.input_shape(0).at(1)}};
  return {type, type};
}

// "n c s0 s1" in the node's layout, and the names of all factors but c.
std::string image_equation(const OpContext& op, std::vector<std::string>* others) {
  const bool last = op.attributes().get_string("layout", "nchw") == "nhwc";
  const int ndim = static_cast<int>(op.input_shape(0).size()) - 2;
  others->assign(1, "n");
  for (int d = 0; d < ndim; ++d) {
    others->push_back(concat("s", d));
  }
  const std::string spatial = dim_names("s", ndim);
  return last ? concat("n ", spatial, " c") : concat("n c ", spatial);
}

// `shape` has I for the image and its factors for the rest. `sums`: the output sums over all but c.
ShardingRule image_sharding(const OpContext& op, std::string shape, bool sums) {
  std::vector<std::string> others;
  const std::string image = image_equation(op, &others);
  for (size_t at = shape.find('I'); at != std::string::npos; at = shape.find('I')) {
    shape.replace(at, 1, image);
  }
  Factors factors(op, shape);
  if (sums) {
    for (const std::string& other : others) {
      factors.reduction(other);
    }
  }
  return factors;
}

const TensorType kImage{DType::kFloat32, {4, 6, 3, 5}};
const TensorType kImageLast{DType::kFloat32, {4, 3, 5, 6}};
const TensorType kChannels{DType::kFloat32, {6}};

// Moments of 60 elements per channel with mean 0.1 and variance about 1.
Tensor example_moments() {
  std::vector<double> values;
  for (int i = 0; i < 12; ++i) {
    values.push_back(i < 6 ? 6.0 + i : 60.0 + 3 * i);
  }
  return Tensor::from(values, {2, 6});
}

// Adds examples of a kernel over images: `images` of them, then the rest; both layouts.
void add_examples(OpDef& op, int images, const std::vector<char>& rest, bool relu = false) {
  for (const bool last : {false, true}) {
    OpExample example;
    const std::string layout = last ? "nhwc" : "nchw";
    example.name = concat(layout, relu ? "_relu" : "", rest.size());
    example.attributes = {{"count", int64_t{60}}, {"epsilon", 1e-5}, {"layout", layout}};
    if (relu) {
      example.attributes.set("relu", int64_t{1});
    }
    example.inputs.assign(static_cast<size_t>(images), last ? kImageLast : kImage);
    example.values.resize(static_cast<size_t>(images));
    for (const char kind : rest) {  // m: moments, c: one per channel, r: another image
      example.inputs.push_back(kind == 'm'   ? TensorType{DType::kFloat64, {2, 6}}
                               : kind == 'c' ? kChannels
                                             : example.inputs[0]);
      example.values.push_back(kind == 'm' ? example_moments() : Tensor());
    }
    op.examples.push_back(std::move(example));
  }
}

OpDef moments_op() {
  OpDef op;
  op.name = "BatchNormMoments";
  op.infer_types = infer_sums;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 3); };
  op.sharding = [](const OpContext& context) { return image_sharding(context, "I -> 1 c", true); };
  op.reference_kernel = batch_norm::moments_reference;
  op.cpu_kernel = batch_norm::moments;
  op.workspace = batch_norm::workspace;
  op.not_differentiable = true;  // BatchNormApply's gradient goes through the moments itself
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  add_examples(op, 1, {});
  return op;
}

void apply_gradient(GradientBuilder& g) {
  Attributes attributes = g.attributes();
  const ValueId x = g.input(0), moments = g.input(1), scale = g.input(2), bias = g.input(3);
  ValueId dy = g.output_grad(0);
  bool relu = attributes.get_int("relu", 0) != 0;
  if (g.input(4) != kNoValue) {
    if (relu) {  // what passed depends on the residual too: both gradients start from here
      dy = g.op("ReluGrad", {g.output(0), dy});
      attributes.erase("relu");
      relu = false;
    }
    if (g.needs_grad(4)) {
      g.set_input_grad(4, dy);
    }
  }
  std::vector<ValueId> sum_inputs = {dy, x, moments};
  if (relu) {
    sum_inputs.insert(sum_inputs.end(), {scale, bias});
  }
  const ValueId sums = g.op("BatchNormGradSums", sum_inputs, attributes);
  if (g.needs_grad(0)) {
    std::vector<ValueId> inputs = {dy, x, scale, moments, sums};
    if (relu) {
      inputs.push_back(bias);
    }
    g.set_input_grad(0, g.op("BatchNormInputGrad", inputs, attributes));
  }
  if (g.needs_grad(1) && attributes.get_int("fixed", 0) != 0) {
    g.set_input_grad(1, g.op("BatchNormMomentsGrad", {sums, moments, scale}, attributes));
  }
  if (g.needs_grad(2) || g.needs_grad(3)) {
    const std::vector<ValueId> grads = g.node(
        "BatchNormParameterGrad", {sums}, {{"dtype", std::string(dtype_name(g.dtype(scale)))}});
    for (int i = 0; i < 2; ++i) {
      if (g.needs_grad(2 + i)) {
        g.set_input_grad(2 + i, grads[static_cast<size_t>(i)]);
      }
    }
  }
}

OpDef apply_op() {
  OpDef op;
  op.name = "BatchNormApply";
  op.infer_types = infer_apply;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 3); };
  op.sharding = [](const OpContext& context) {
    return image_sharding(
        context, concat("I, 1 c, c, c", context.has_input(4) ? ", I" : "", " -> I"), false);
  };
  op.reference_kernel = batch_norm::apply_reference;
  op.cpu_kernel = batch_norm::apply;
  op.workspace = batch_norm::workspace;
  op.gradient = apply_gradient;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.inplace = {{0, 0}};
  add_examples(op, 1, {'m', 'c', 'c'});
  add_examples(op, 1, {'m', 'c', 'c'}, /*relu=*/true);
  add_examples(op, 1, {'m', 'c', 'c', 'r'});
  add_examples(op, 1, {'m', 'c', 'c', 'r'}, /*relu=*/true);
  for (OpExample& example : op.examples) {
    // Unless the moments are fixed, the gradient of x includes the way through them, which an
    // example cannot show: there they are an input.
    example.attributes.set("fixed", int64_t{1});
  }
  return op;
}

OpDef grad_sums_op() {
  OpDef op;
  op.name = "BatchNormGradSums";
  op.infer_types = infer_sums;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 6); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    ShardingRule rule = image_sharding(
        context, concat("I, I, 1 c", context.has_input(3) ? ", c, c" : "", " -> 1 c"), true);
    rule.linear = {{0}};
    return rule;
  };
  op.reference_kernel = batch_norm::grad_sums_reference;
  op.cpu_kernel = batch_norm::grad_sums;
  op.workspace = batch_norm::workspace;
  add_examples(op, 2, {'m'});
  add_examples(op, 2, {'m', 'c', 'c'}, /*relu=*/true);
  return op;
}

OpDef input_grad_op() {
  OpDef op;
  op.name = "BatchNormInputGrad";
  op.infer_types = [](const OpContext& context) -> TensorTypes { return {context.input_type(0)}; };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 6); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    ShardingRule rule = image_sharding(
        context, concat("I, I, c, 1 c, 1 c", context.has_input(5) ? ", c" : "", " -> I"), false);
    rule.linear = {{0, 4}};
    return rule;
  };
  op.reference_kernel = batch_norm::input_grad_reference;
  op.cpu_kernel = batch_norm::input_grad;
  op.inplace = {{0, 0}};
  op.workspace = batch_norm::workspace;
  add_examples(op, 2, {'c', 'm', 'm'});
  add_examples(op, 2, {'c', 'm', 'm', 'c'}, /*relu=*/true);
  return op;
}

// Operators on [2, c] or [c]: too small to split otherwise than by channel.
OpDef channels_op(const char* name, Kernel kernel) {
  OpDef op;
  op.name = name;
  op.infer_types = infer_from_moments;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 3); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors(context, "1 c -> c, c");
  };
  op.reference_kernel = std::move(kernel);
  op.cheap = true;
  op.examples = {{.name = "channels",
                  .attributes = {{"count", int64_t{60}}, {"dtype", std::string("float32")}},
                  .inputs = {{DType::kFloat64, {2, 6}}},
                  .values = {example_moments()},
                  .check_gradient = {}}};
  return op;
}

OpDef statistics_op() {
  OpDef op = channels_op("BatchNormStatistics", batch_norm::statistics);
  op.not_differentiable = true;  // they are remembered, not learned
  return op;
}

OpDef parameter_grad_op() {
  OpDef op = channels_op("BatchNormParameterGrad", batch_norm::parameter_grad);
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors(context, "1 c -> c, c").linear({{0}});
  };
  return op;
}

OpDef moments_grad_op() {
  OpDef op;
  op.name = "BatchNormMomentsGrad";
  op.infer_types = [](const OpContext& context) -> TensorTypes { return {context.input_type(1)}; };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 8); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors(context, "1 c, 1 c, c -> 1 c").linear({{0}});
  };
  op.reference_kernel = batch_norm::moments_grad;
  op.examples = {{.name = "channels",
                  .attributes = {{"count", int64_t{60}}, {"epsilon", 1e-5}},
                  .inputs = {{DType::kFloat64, {2, 6}}, {DType::kFloat64, {2, 6}}, kChannels},
                  .values = {Tensor(), example_moments(), Tensor()}}};
  return op;
}

// m0 = mean, m1 = var + mean^2.
void fixed_moments_gradient(GradientBuilder& g) {
  const DType dtype = g.dtype(g.input(0));
  const int64_t c = g.input_shape(0)[0];
  const auto row = [&](int64_t i) {
    const ValueId slice = g.op(
        "Slice",
        {g.output_grad(0)},
        {{"starts", Shape{i}}, {"ends", Shape{i + 1}}, {"axes", Shape{0}}, {"steps", Shape{1}}});
    return g.cast(g.reshape(slice, {c}), dtype);
  };
  if (g.needs_grad(0)) {
    g.set_input_grad(0, g.add(row(0), g.mul(g.mul(row(1), g.input(0)), 2.0)));
  }
  if (g.needs_grad(1)) {
    g.set_input_grad(1, row(1));
  }
}

OpDef fixed_moments_op() {
  OpDef op;
  op.name = "BatchNormFixedMoments";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    TRAINRT_REQUIRE(
        context.input_shape(0).size() == 1 && context.input_type(0) == context.input_type(1),
        kInvalidModel,
        "BatchNormalization: mean and var are ",
        shape_string(context.input_shape(0)),
        " and ",
        shape_string(context.input_shape(1)),
        ", wanted two equal [c]");
    return {{DType::kFloat64, {2, context.input_shape(0)[0]}}};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 2); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors(context, "c, c -> 1 c");
  };
  op.reference_kernel = batch_norm::fixed_moments;
  op.gradient = fixed_moments_gradient;
  op.cheap = true;
  op.examples = {{.name = "channels",
                  .attributes = {},
                  .inputs = {kChannels, kChannels},
                  .values = {},
                  .low = 0.5}};
  return op;
}

OpDef running_average_op() {
  OpDef op = binary_op<RunningAverage>("RunningAverage");
  op.precision = PrecisionRule::kFull;
  op.upgrade = nullptr;
  op.not_differentiable = true;
  op.inplace = {{0, 0}};
  op.examples = {grad_example(-1, 1, {{"momentum", 0.9}})};
  return op;
}

// What a state holds after the nodes before this one: a module that is used twice takes in its
// first use before the second.
ValueId latest_contents(const UpgradeContext& u, int i) {
  for (const StateUpdate& update : u.graph().updates()) {
    if (update.target == u.input(i)) {
      return update.new_value;
    }
  }
  return u.input(i);
}

void upgrade(UpgradeContext& u) {
  Attributes& given = u.attributes();
  if (given.get_int("spatial", 1) == 0) {
    u.fail("spatial = 0 (statistics per position) is not supported");
  }
  const Shape x = u.shape(u.input(0));
  if (x.size() < 2) {
    u.fail(concat("x must be [n, c, ...], got ", shape_string(x)));
  }
  const bool training = u.opset() >= 14  ? given.get_int("training_mode", 0) != 0
                        : u.opset() >= 7 ? u.wants_output(1) || u.wants_output(2)
                                         : given.get_int("is_test", 0) == 0;
  Attributes attributes = {{"epsilon", given.get_float("epsilon", 1e-5)}, {"count", int64_t{1}}};
  if (!training) {
    attributes.set("fixed", int64_t{1});
    const ValueId moments =
        u.op("BatchNormFixedMoments", {u.input(3), u.input(4)}, {}, u.node_name() + "/moments");
    u.set_output(
        0,
        u.emit("BatchNormApply", {u.input(0), moments, u.input(1), u.input(2)}, attributes).at(0));
    return;
  }
  attributes.set("count", num_elements(x) / std::max<int64_t>(1, x[1]));
  const ValueId moments = u.op("BatchNormMoments", {u.input(0)}, {}, u.node_name() + "/moments");
  u.set_output(
      0, u.emit("BatchNormApply", {u.input(0), moments, u.input(1), u.input(2)}, attributes).at(0));
  const double momentum = given.get_float("momentum", 0.9);
  const std::vector<ValueId> batch =
      u.node("BatchNormStatistics",
             {moments},
             {{"count", attributes.get_int("count")},
              {"dtype", std::string(dtype_name(u.dtype(u.input(3))))}},
             u.node_name() + "/statistics");
  for (int i = 0; i < 2; ++i) {
    const ValueId running = u.op("RunningAverage",
                                 {latest_contents(u, 3 + i), batch[static_cast<size_t>(i)]},
                                 {{"momentum", momentum}},
                                 u.node_name() + (i == 0 ? "/mean" : "/var"));
    u.set_output(1 + i, running);
    u.set_output(3 + i, batch[static_cast<size_t>(i)]);
    u.bind_state(3 + i,
                 running,
                 concat(i == 0 ? "running mean" : "running variance",
                        " of BatchNormalization '",
                        u.node_name(),
                        "'"));
  }
}

// Relu(BatchNormApply(x)) and Relu(BatchNormApply(x) + residual): one pass instead of two or three.
bool fuse_relu(FusionContext& f) {
  const Node& root = f.graph().node(f.root());
  const ValueId y = root.outputs[0], sum = root.inputs[0];
  const auto unfused_norm = [&](ValueId id) {
    const NodeId norm = f.single_use(id) ? f.producer(id, "BatchNormApply") : kNoNode;
    const bool plain = norm != kNoNode && f.graph().node(norm).inputs.size() == 4 &&
                       !f.graph().node(norm).attributes.has("relu");
    return plain ? norm : kNoNode;
  };
  NodeId norm = unfused_norm(sum);
  ValueId residual = kNoValue;
  if (norm == kNoNode) {
    const NodeId add = f.single_use(sum) ? f.producer(sum, "Add") : kNoNode;
    if (add == kNoNode) {
      return false;
    }
    residual = f.other_operand(add, [&](ValueId id) {
      norm = unfused_norm(id);
      return norm != kNoNode;
    });
    if (residual == kNoValue || f.type(residual) != f.type(y) ||
        f.type(f.graph().node(norm).inputs[0]) != f.type(y)) {
      return false;
    }
  }
  std::vector<ValueId> inputs = f.graph().node(norm).inputs;
  if (residual != kNoValue) {
    inputs.push_back(residual);
  }
  Attributes attributes = f.graph().node(norm).attributes;
  attributes.set("relu", int64_t{1});
  f.replace(y, f.op("BatchNormApply", inputs, attributes));
  return true;
}

const RegisterFusion kFuseRelu{
    {.name = "BatchNormRelu", .root_op_type = "Relu", .priority = 0, .rewrite = fuse_relu}};
const RegisterOp kMoments{moments_op()};
const RegisterOp kApply{apply_op()};
const RegisterOp kGradSums{grad_sums_op()};
const RegisterOp kInputGrad{input_grad_op()};
const RegisterOp kStatistics{statistics_op()};
const RegisterOp kParameterGrad{parameter_grad_op()};
const RegisterOp kFixedMoments{fixed_moments_op()};
const RegisterOp kMomentsGrad{moments_grad_op()};
const RegisterOp kRunningAverage{running_average_op()};
const RegisterImageRule kMomentsImages{"BatchNormMoments",
                                       {.form = ImageForm::kLayout, .images = {0}}};
const RegisterImageRule kApplyImages{"BatchNormApply",
                                     {.form = ImageForm::kLayout, .images = {0, 4}}};
const RegisterUpgrade kBatchNorm{"BatchNormalization", upgrade};

}  // namespace

}  // namespace trainrt
