// Conv, ConvInputGrad, ConvWeightGrad: one bilinear map y = conv(x, w) seen from its three sides.
//
//   Conv(x, w[, bias])       -> y                  attributes of ops/spatial.h and `group`
//   ConvInputGrad(dy, w)     -> dx                 and `input_spatial`, the spatial sizes of x
//   ConvWeightGrad(x, dy)    -> dw
//
// Each one's gradients are the other two, so the triple is closed under differentiation, and
// ConvTranspose is ConvInputGrad (ops/conv_transpose.cc). w is [m, c / group, kernel...] whatever
// the layout of the images. A bias makes the operator affine: then the input channels cannot be
// split (each shard would add it); without one they are a reduction.
//
// The reference is in ops/conv_reference.cc. float32 and bfloat16 run on oneDNN, one to three
// spatial dims; float64 on ops/conv_f64, and the 3 x 3 of residual networks on ops/winograd.
#include <algorithm>

#include "graph/autodiff.h"
#include "graph/passes/layout.h"
#include "graph/upgrade.h"
#include "ops/conv_f64.h"
#include "ops/convolution.h"
#include "ops/onednn.h"
#include "ops/widened.h"
#include "ops/winograd.h"

namespace trainrt {

namespace {

void check_shape(const char* what, const Shape& found, const Shape& wanted) {
  TRAINRT_REQUIRE(found == wanted,
                  kInvalidModel,
                  "convolution: ",
                  what,
                  " is ",
                  shape_string(found),
                  ", wanted ",
                  shape_string(wanted));
}

void check_groups(const Convolution& conv) {
  TRAINRT_REQUIRE(conv.c % conv.group == 0 && conv.m % conv.group == 0,
                  kInvalidModel,
                  "convolution: ",
                  conv.c,
                  " input and ",
                  conv.m,
                  " output channels do not divide into ",
                  conv.group,
                  " groups");
}

TensorTypes infer_conv(const OpContext& op) {
  const Convolution conv = convolution_of(op);
  check_groups(conv);
  check_shape("the weight", op.input_shape(1), conv.w_shape());
  if (op.has_input(2)) {
    check_shape("the bias", op.input_shape(2), {conv.m});
  }
  return {{op.input_dtype(0), conv.y_shape()}};
}

TensorTypes infer_input_grad(const OpContext& op) {
  const Convolution conv = convolution_of(op);
  check_groups(conv);
  check_shape("the weight", op.input_shape(1), conv.w_shape());
  check_shape(
      "the output's spatial size", conv.output, window_output(conv.window, conv.input, false));
  return {{op.input_dtype(0), conv.x_shape()}};
}

TensorTypes infer_weight_grad(const OpContext& op) {
  const Convolution conv = convolution_of(op);
  check_groups(conv);
  check_shape("the output's gradient", op.input_shape(1), conv.y_shape());
  return {{op.input_dtype(0), conv.w_shape()}};
}

// ---- oneDNN ----------------------------------------------------------------------------------

// The descriptors of the triple as the tensors lie in memory; oneDNN's dims are always n, c,
// spatial.
struct Layouts {
  dnnl::memory::desc x, w, y;
};

dnnl::memory::desc image_layout(DType dtype, const ImageShape& image, bool channels_last) {
  const ImageStrides strides = strides_of(to_shape(image, channels_last), channels_last);
  Shape ordered = {strides.n, strides.c};
  ordered.insert(ordered.end(), strides.spatial.begin(), strides.spatial.end());
  return onednn::strided(dtype, to_shape(image, false), ordered);
}

Shape grouped_w_shape(const Convolution& conv) {
  Shape shape = conv.w_shape();
  if (conv.group > 1) {
    shape[0] /= conv.group;
    shape.insert(shape.begin(), conv.group);
  }
  return shape;
}

Layouts tensor_layouts(const Convolution& conv, DType dtype) {
  const bool last = conv.window.channels_last;
  return {image_layout(dtype, {conv.n, conv.c, conv.input}, last),
          onednn::row_major(dtype, grouped_w_shape(conv)),
          image_layout(dtype, {conv.n, conv.m, conv.output}, last)};
}

// What the primitive is asked for. Weights are small beside images: always in the layout oneDNN
// likes best. Images in nhwc are used as they are; in nchw they are copied into blocks of channels,
// which costs two passes over them and still beats oneDNN's kernels for plain nchw.
Layouts wanted_layouts(const Convolution& conv, DType dtype, const Layouts& tensors) {
  Layouts wanted = tensors;
  wanted.w = onednn::any_layout(dtype, grouped_w_shape(conv));
  if (!conv.window.channels_last) {
    wanted.x = onednn::any_layout(dtype, to_shape({conv.n, conv.c, conv.input}, false));
    wanted.y = onednn::any_layout(dtype, to_shape({conv.n, conv.m, conv.output}, false));
  }
  return wanted;
}

onednn::Prepared prepare_conv(const OpContext& op) {
  const Convolution conv = convolution_of(op);
  const DType dtype = op.input_dtype(0);
  const Layouts tensors = tensor_layouts(conv, dtype);
  const Layouts wanted = wanted_layouts(conv, dtype, tensors);
  const Window& window = conv.window;
  Shape dilations = window.dilations;  // oneDNN counts the gaps
  for (int64_t& dilation : dilations) {
    --dilation;
  }
  const auto& engine = onednn::engine();
  const auto algorithm = dnnl::algorithm::convolution_direct;
  const dnnl::primitive_attr attr = onednn::user_scratchpad();
  const dnnl::memory::desc bias =
      op.has_input(2) ? onednn::row_major(dtype, {conv.m}) : dnnl::memory::desc();
  const dnnl::convolution_forward::primitive_desc forward(engine,
                                                          dnnl::prop_kind::forward_training,
                                                          algorithm,
                                                          wanted.x,
                                                          wanted.w,
                                                          bias,
                                                          wanted.y,
                                                          window.strides,
                                                          dilations,
                                                          window.pads_begin,
                                                          window.pads_end,
                                                          attr);
  const std::string& type = op.node().op_type;
  if (type == "Conv") {
    std::vector<onednn::Argument> arguments = {{DNNL_ARG_SRC, false, 0, tensors.x},
                                               {DNNL_ARG_WEIGHTS, false, 1, tensors.w},
                                               {DNNL_ARG_DST, true, 0, tensors.y}};
    if (op.has_input(2)) {
      arguments.push_back({DNNL_ARG_BIAS, false, 2, bias});
    }
    return {forward, dnnl::convolution_forward(forward), std::move(arguments)};
  }
  if (type == "ConvInputGrad") {
    const dnnl::convolution_backward_data::primitive_desc backward(engine,
                                                                   algorithm,
                                                                   wanted.x,
                                                                   wanted.w,
                                                                   wanted.y,
                                                                   window.strides,
                                                                   dilations,
                                                                   window.pads_begin,
                                                                   window.pads_end,
                                                                   forward,
                                                                   attr);
    return {backward,
            dnnl::convolution_backward_data(backward),
            {{DNNL_ARG_DIFF_DST, false, 0, tensors.y},
             {DNNL_ARG_WEIGHTS, false, 1, tensors.w},
             {DNNL_ARG_DIFF_SRC, true, 0, tensors.x}}};
  }
  const dnnl::convolution_backward_weights::primitive_desc backward(engine,
                                                                    algorithm,
                                                                    wanted.x,
                                                                    wanted.w,
                                                                    wanted.y,
                                                                    window.strides,
                                                                    dilations,
                                                                    window.pads_begin,
                                                                    window.pads_end,
                                                                    forward,
                                                                    attr);
  return {backward,
          dnnl::convolution_backward_weights(backward),
          {{DNNL_ARG_SRC, false, 0, tensors.x},
           {DNNL_ARG_DIFF_DST, false, 1, tensors.y},
           {DNNL_ARG_DIFF_WEIGHTS, true, 0, tensors.w}}};
}

bool runs_on_onednn(const OpContext& op) {
  const Convolution conv = convolution_of(op);
  return onednn::supports(op.input_dtype(0)) && conv.window.ndim() >= 1 &&
         conv.window.ndim() <= 3 && op.num_elements(0) > 0 && num_elements(op.output_shape(0)) > 0;
}

// Room for cuDNN, which picks among engines that differ in what they need, and, in nhwc, for the
// weight in that order (ops/conv_cudnn.cuh): a rule of the shapes alone, so that a plan knows it.
int64_t cudnn_workspace(const OpContext& op, const DeviceSpec& spec) {
  const Convolution conv = convolution_of(op);
  if (op.input_dtype(0) == DType::kFloat64) {
    return 0;
  }
  constexpr int64_t kAlignment = 64, kLeast = int64_t{1} << 20;
  const int64_t weight = num_elements(conv.w_shape()) * dtype_bytes(op.input_dtype(0));
  const int64_t copy =
      conv.window.channels_last ? (weight + kAlignment - 1) / kAlignment * kAlignment : 0;
  return copy + std::min(spec.workspace_cap, kLeast + 2 * (op.input_bytes() + op.output_bytes()));
}

int64_t workspace(const OpContext& op, const DeviceSpec& spec) {
  if (spec.backend == Backend::kCuda) {
    return cudnn_workspace(op, spec);
  }
  if (op.input_dtype(0) == DType::kFloat64) {
    return conv_f64_workspace(op);
  }
  if (!runs_on_onednn(op)) {
    return 0;
  }
  if (winograd_applies(op)) {
    return winograd_workspace(op, spec);
  }
  return onednn::prepare(op, spec, prepare_conv)->workspace_bytes();
}

Kernel cpu_factory(const OpContext& op, const DeviceSpec& spec) {
  if (op.input_dtype(0) == DType::kFloat64) {
    return conv_f64;
  }
  if (!runs_on_onednn(op)) {
    return convolution_reference;
  }
  if (winograd_applies(op)) {
    return winograd_convolution;
  }
  return [prepared = onednn::prepare(op, spec, prepare_conv)](KernelContext& context) {
    prepared->run(context);
  };
}

// ---- description -----------------------------------------------------------------------------

Cost cost(const OpContext& op) {
  const Convolution conv = convolution_of(op);
  const std::string& type = op.node().op_type;
  const int64_t rows = conv.n * num_elements(conv.output);
  const int64_t columns = conv.c / conv.group * conv.taps(), m = conv.m / conv.group;
  Cost cost;
  cost.bytes = static_cast<double>(op.input_bytes() + op.output_bytes());
  if (type == "Conv") {
    cost.matmuls = {{conv.group, rows, m, columns}};
  } else if (type == "ConvInputGrad") {
    cost.matmuls = {{conv.group, rows, columns, m}};
  } else {
    cost.matmuls = {{conv.group, m, columns, rows}};
  }
  return cost;
}

// The equation of one image or weight: grouped convolutions split by group, others by channel.
std::string image_dims(const Convolution& conv, const char* channel, const char* prefix) {
  const std::string channels = conv.group > 1 ? concat("(g ", channel, ")") : channel;
  const std::string spatial = dim_names(prefix, conv.window.ndim());
  return conv.window.channels_last ? concat("n ", spatial, " ", channels)
                                   : concat("n ", channels, " ", spatial);
}

ShardingRule sharding(const OpContext& op) {
  const Convolution conv = convolution_of(op);
  const std::string& type = op.node().op_type;
  const std::string x = image_dims(conv, "c", "s"), y = image_dims(conv, "m", "o");
  const std::string w =
      concat(conv.group > 1 ? "(g m)" : "m", " c ", dim_names("k", conv.window.ndim()));
  std::string equation;
  if (type == "Conv") {
    equation =
        concat(x, ", ", w, op.has_input(2) ? (conv.group > 1 ? ", (g m)" : ", m") : "", " -> ", y);
  } else if (type == "ConvInputGrad") {
    equation = concat(y, ", ", w, " -> ", x);
  } else {
    equation = concat(x, ", ", y, " -> ", w);
  }
  Factors factors(op, equation);
  for (int d = 0; d < conv.window.ndim(); ++d) {
    factors.whole(concat("s", d)).whole(concat("o", d)).whole(concat("k", d));
  }
  if (conv.group > 1) {
    factors.size("g", conv.group).size("c", conv.c / conv.group).size("m", conv.m / conv.group);
    factors.whole("c").whole("m");
  }
  if (type == "ConvWeightGrad") {
    factors.reduction("n");
  } else if (conv.group == 1 && type == "Conv" && op.has_input(2)) {
    factors.whole("c");
  } else if (conv.group == 1) {
    factors.reduction(type == "Conv" ? "c" : "m");
  }
  if (!op.has_input(2)) {
    factors.linear({{0}, {1}});
  }
  return factors;
}

// A shard of the groups is a convolution of fewer groups.
Attributes localize(const OpContext& op, const FactorShard& shard) {
  Attributes attributes = op.attributes();
  if (shard.factor == sharding(op).find("g")) {
    attributes.set("group", shard.size);
  }
  return attributes;
}

// Attributes for an operator of the triple, from those of another.
Attributes without_input_spatial(const Attributes& attributes) {
  Attributes copy = attributes;
  copy.erase("input_spatial");
  return copy;
}

Attributes with_input_spatial(const Attributes& attributes, const Shape& x_shape) {
  Attributes copy = attributes;
  const bool last = attributes.get_string("layout", "nchw") == "nhwc";
  copy.set("input_spatial", image_shape(x_shape, last).spatial);
  return copy;
}

void conv_gradient(GradientBuilder& g) {
  const ValueId x = g.input(0), w = g.input(1), dy = g.output_grad(0);
  if (g.needs_grad(0)) {
    g.set_input_grad(
        0, g.op("ConvInputGrad", {dy, w}, with_input_spatial(g.attributes(), g.shape(x))));
  }
  if (g.needs_grad(1)) {
    g.set_input_grad(1, g.op("ConvWeightGrad", {x, dy}, g.attributes()));
  }
  if (g.needs_grad(2)) {
    const bool last = g.attributes().get_string("layout", "nchw") == "nhwc";
    std::vector<int64_t> axes;
    for (int d = 0; d < g.ndim(dy); ++d) {
      if (d != (last ? g.ndim(dy) - 1 : 1)) {
        axes.push_back(d);
      }
    }
    g.set_input_grad(2, g.reduce_sum(dy, axes, /*keepdims=*/false));
  }
}

void input_grad_gradient(GradientBuilder& g) {
  const ValueId dy = g.input(0), w = g.input(1), ddx = g.output_grad(0);
  const Attributes attributes = without_input_spatial(g.attributes());
  if (g.needs_grad(0)) {
    g.set_input_grad(0, g.op("Conv", {ddx, w}, attributes));
  }
  if (g.needs_grad(1)) {
    g.set_input_grad(1, g.op("ConvWeightGrad", {ddx, dy}, attributes));
  }
}

void weight_grad_gradient(GradientBuilder& g) {
  const ValueId x = g.input(0), dy = g.input(1), ddw = g.output_grad(0);
  if (g.needs_grad(0)) {
    g.set_input_grad(
        0, g.op("ConvInputGrad", {dy, ddw}, with_input_spatial(g.attributes(), g.shape(x))));
  }
  if (g.needs_grad(1)) {
    g.set_input_grad(1, g.op("Conv", {x, ddw}, g.attributes()));
  }
}

void upgrade(UpgradeContext& u) {
  const Shape x = u.shape(u.input(0));
  const Shape w = u.shape(u.input(1));
  if (x.size() < 3 || w.size() != x.size()) {
    u.fail(concat("wanted x [n, c, spatial...] and w [m, c / group, kernel...], got ",
                  shape_string(x),
                  " and ",
                  shape_string(w)));
  }
  Attributes attributes = explicit_window(u, {x.begin() + 2, x.end()}, {w.begin() + 2, w.end()});
  attributes.set("group", u.attributes().get_int("group", 1));
  std::vector<ValueId> inputs = {u.input(0), u.input(1)};
  if (u.has_input(2)) {
    inputs.push_back(u.input(2));
  }
  u.set_outputs(u.emit("Conv", inputs, attributes));
}

// Examples of the triple: plain, strided with uneven pads, dilated, grouped, depthwise, 1-D and
// 3-D.
std::vector<OpExample> examples(const std::string& type) {
  struct Case {
    const char* name;
    Shape x, w, kernel, strides, dilations, pads;
    int64_t group;
    const char* layout;
  };
  const std::vector<Case> cases = {
      {"plain", {2, 4, 6, 5}, {6, 4, 3, 3}, {3, 3}, {1, 1}, {1, 1}, {1, 1, 1, 1}, 1, "nchw"},
      {"strided", {2, 2, 7, 6}, {4, 2, 3, 2}, {3, 2}, {2, 3}, {1, 1}, {1, 0, 2, 1}, 1, "nchw"},
      {"dilated", {2, 2, 7, 7}, {4, 2, 2, 3}, {2, 3}, {1, 1}, {2, 2}, {0, 2, 1, 2}, 1, "nchw"},
      {"grouped", {2, 4, 5, 5}, {8, 2, 3, 3}, {3, 3}, {1, 1}, {1, 1}, {1, 1, 1, 1}, 2, "nchw"},
      {"depthwise", {2, 4, 5, 5}, {4, 1, 3, 3}, {3, 3}, {1, 1}, {1, 1}, {1, 1, 1, 1}, 4, "nchw"},
      {"one_dim", {2, 4, 9}, {6, 4, 3}, {3}, {2}, {1}, {1, 1}, 1, "nchw"},
      {"three_dims",
       {1, 2, 4, 4, 4},
       {2, 2, 2, 2, 2},
       {2, 2, 2},
       {1, 1, 1},
       {1, 1, 1},
       {0, 0, 0, 1, 1, 1},
       1,
       "nchw"},
      {"channels_last",
       {2, 6, 5, 4},
       {6, 4, 3, 3},
       {3, 3},
       {2, 1},
       {1, 1},
       {1, 1, 1, 1},
       1,
       "nhwc"},
      {"winograd", {8, 9, 7, 32}, {64, 32, 3, 3}, {3, 3}, {1, 1}, {1, 1}, {1, 1, 1, 1}, 1, "nhwc"},
      {"winograd_uneven_pads",
       {6, 9, 12, 64},
       {32, 64, 3, 3},
       {3, 3},
       {1, 1},
       {1, 1},
       {0, 2, 1, 0},
       1,
       "nhwc"},
      {"grouped_channels_last",
       {2, 5, 5, 4},
       {8, 2, 3, 3},
       {3, 3},
       {1, 1},
       {1, 1},
       {1, 1, 1, 1},
       2,
       "nhwc"},
  };
  std::vector<OpExample> list;
  for (const Case& c : cases) {
    OpExample example;
    example.name = c.name;
    example.attributes = {{"kernel_shape", c.kernel},
                          {"strides", c.strides},
                          {"dilations", c.dilations},
                          {"pads", c.pads},
                          {"group", c.group},
                          {"layout", std::string(c.layout)}};
    const bool last = example.attributes.get_string("layout") == "nhwc";
    const ImageShape image = image_shape(c.x, last);
    const Shape out = window_output(window_of(example.attributes), image.spatial, false);
    const TensorType x{DType::kFloat32, c.x}, w{DType::kFloat32, c.w};
    const TensorType y{DType::kFloat32, to_shape({image.n, c.w[0], out}, last)};
    if (type == "Conv") {
      example.inputs = {x, w};
    } else if (type == "ConvInputGrad") {
      example.inputs = {y, w};
      example.attributes.set("input_spatial", image.spatial);
    } else {
      example.inputs = {x, y};
    }
    if (example.name.starts_with("winograd")) {
      example.check_gradient = {-1};  // the reference's, which the small examples check
    }
    list.push_back(example);
    if (type == "Conv") {
      example.name += "_with_bias";
      example.inputs.push_back({DType::kFloat32, {c.w[0]}});
      list.push_back(example);
    }
  }
  return list;
}

OpDef side(const char* name,
           TensorTypes (*infer)(const OpContext&),
           void (*gradient)(GradientBuilder&)) {
  OpDef op;
  op.name = name;
  op.infer_types = infer;
  op.cost = cost;
  op.sharding = sharding;
  op.localize = localize;
  op.reference_kernel = convolution_reference;
  op.gradient = gradient;
  op.workspace = workspace;
  op.cpu_factory = cpu_factory;
  widen_16_bit(op, runs_on_onednn);
  op.precision = PrecisionRule::kLow;  // ConvTranspose is a ConvInputGrad
  op.examples = examples(name);
  return op;
}

OpDef conv_op() {
  OpDef op = side("Conv", infer_conv, conv_gradient);
  op.upgrade = upgrade;
  return op;
}

const RegisterOp kConv{conv_op()};
const RegisterOp kConvInputGrad{side("ConvInputGrad", infer_input_grad, input_grad_gradient)};
const RegisterImageRule kConvImages{"Conv",
                                    {.form = ImageForm::kLayout, .images = {0}, .leads = true}};
const RegisterImageRule kConvInputGradImages{
    "ConvInputGrad", {.form = ImageForm::kLayout, .images = {0}, .leads = true}};
const RegisterOp kConvWeightGrad{side("ConvWeightGrad", infer_weight_grad, weight_grad_gradient)};

}  // namespace

}  // namespace trainrt
