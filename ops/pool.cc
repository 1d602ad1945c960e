// MaxPool and AveragePool over windows (attributes of ops/spatial.h, ceil_mode, count_include_pad):
//
//   MaxPool(x)             -> y[, indices[, taps]]   indices: ONNX's flat int64 positions in x
//   MaxPoolGrad(taps, dy)  -> dx                     `input_spatial`: the spatial sizes of x
//   AveragePool(x)         -> y
//   AveragePoolGrad(dy)    -> dx                     `input_spatial`
//
// `taps` is what the gradient saves: the number of the largest element within its window, a byte
// per output where x would be several floats. The first maximum of a window wins, as in PyTorch;
// NaN counts as larger than everything. A last window that starts in the end padding does not exist
// (see window_output).
#include "ops/pool.h"

#include "graph/autodiff.h"
#include "graph/passes/layout.h"
#include "graph/upgrade.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

using pool::Pool;
using pool::pool_of;

// ---- description -----------------------------------------------------------------------------

// "n c s0 s1" with spatial dims of prefix.
std::string image_dims(const Window& window, const char* prefix) {
  const std::string spatial = dim_names(prefix, window.ndim());
  return window.channels_last ? concat("n ", spatial, " c") : concat("n c ", spatial);
}

ShardingRule sharding(const OpContext& op) {
  const Pool pool = pool_of(op);
  const std::string x = image_dims(pool.window, "s"), y = image_dims(pool.window, "o");
  const std::string& type = op.node().op_type;
  std::string equation;
  if (type == "MaxPool") {
    equation = concat(x, " -> ", y);
    for (int i = 1; i < op.num_outputs(); ++i) {
      equation += ", " + y;
    }
  } else if (type == "MaxPoolGrad") {
    equation = concat(y, ", ", y, " -> ", x);
  } else {
    equation = type == "AveragePool" ? concat(x, " -> ", y) : concat(y, " -> ", x);
  }
  Factors factors(op, equation);
  for (int d = 0; d < pool.window.ndim(); ++d) {
    factors.whole(concat("s", d)).whole(concat("o", d));
  }
  // Flat positions count whole planes and images: a shard would count its own.
  if (type == "MaxPool" && op.has_output(1) && !op.node().outputs.empty()) {
    factors.whole("n").whole("c");
  }
  if (type != "MaxPool") {
    factors.linear({{type == "MaxPoolGrad" ? 1 : 0}});
  }
  return factors;
}

TensorTypes infer(const OpContext& op) {
  const Pool pool = pool_of(op);
  TRAINRT_REQUIRE(pool.window.ndim() <= 3,
                  kUnsupported,
                  "pools have one to three spatial dims, got ",
                  pool.window.ndim());
  const bool last = pool.window.channels_last;
  const std::string& type = op.node().op_type;
  const Shape x = to_shape(pool.in, last), y = to_shape({pool.in.n, pool.in.c, pool.out}, last);
  if (type == "MaxPoolGrad") {
    TRAINRT_REQUIRE(op.input_shape(0) == y && op.input_shape(1) == y &&
                        op.input_dtype(0) == pool::tap_dtype(pool.window),
                    kInvalidModel,
                    "MaxPoolGrad: taps and dy are ",
                    dtype_name(op.input_dtype(0)),
                    shape_string(op.input_shape(0)),
                    " and ",
                    shape_string(op.input_shape(1)),
                    ", wanted ",
                    dtype_name(pool::tap_dtype(pool.window)),
                    " and both ",
                    shape_string(y));
    return {{op.input_dtype(1), x}};
  }
  require_real(op);
  const DType dtype = op.input_dtype(0);
  if (type == "MaxPool") {
    return {{dtype, y}, {DType::kInt64, y}, {pool::tap_dtype(pool.window), y}};
  }
  return {{dtype, type == "AveragePool" ? y : x}};
}

Attributes with_input_spatial(GradientBuilder& g) {
  Attributes attributes = g.attributes();
  const bool last = attributes.get_string("layout", "nchw") == "nhwc";
  attributes.set("input_spatial", image_shape(g.input_shape(0), last).spatial);
  return attributes;
}

void max_pool_gradient(GradientBuilder& g) {
  if (g.output_grad(0) != kNoValue) {
    g.set_input_grad(
        0, g.op("MaxPoolGrad", {g.saved_output(2), g.output_grad(0)}, with_input_spatial(g)));
  }
}

void average_pool_gradient(GradientBuilder& g) {
  g.set_input_grad(0, g.op("AveragePoolGrad", {g.output_grad(0)}, with_input_spatial(g)));
}

Attributes pool_attributes(UpgradeContext& u) {
  if (!is_floating(u.dtype(u.input(0)))) {
    u.fail(concat("only floating-point tensors are pooled, got ", dtype_name(u.dtype(u.input(0)))));
  }
  const Shape x = u.shape(u.input(0));
  if (x.size() < 3) {
    u.fail(concat("x must be [n, c, spatial...], got ", shape_string(x)));
  }
  if (!u.attributes().has("kernel_shape")) {
    u.fail("attribute kernel_shape is missing");
  }
  Attributes attributes = explicit_window(u, {x.begin() + 2, x.end()}, {});
  for (const char* name : {"ceil_mode", "count_include_pad"}) {
    if (u.attributes().get_int(name, 0) != 0) {
      attributes.set(name, int64_t{1});
    }
  }
  return attributes;
}

void upgrade_max_pool(UpgradeContext& u) {
  Attributes attributes = pool_attributes(u);
  attributes.erase("count_include_pad");
  if (u.wants_output(1) && u.attributes().get_int("storage_order", 0) != 0) {
    u.fail("indices in column-major storage_order are not supported");
  }
  u.set_outputs(u.emit("MaxPool", {u.input(0)}, attributes));
}

void upgrade_average_pool(UpgradeContext& u) {
  u.set_outputs(u.emit("AveragePool", {u.input(0)}, pool_attributes(u)));
}

// (sum |x|^p)^(1/p): the average with padding counted, times the size of the window.
void upgrade_lp_pool(UpgradeContext& u) {
  Attributes attributes = pool_attributes(u);
  attributes.set("count_include_pad", int64_t{1});
  const double p = u.attributes().get_float("p", 2);
  if (u.attributes().get_int("ceil_mode", 0) != 0) {
    u.fail("ceil_mode is not supported");
  }
  const double taps = static_cast<double>(num_elements(attributes.get_ints("kernel_shape")));
  const DType dtype = u.dtype(u.input(0));
  const ValueId powers = u.op("Pow", {u.op("Abs", {u.input(0)}), u.scalar(p, dtype)});
  const ValueId sums = u.mul(u.emit("AveragePool", {powers}, attributes).at(0), taps);
  u.set_output(0, u.op("Pow", {sums, u.scalar(1 / p, dtype)}));
}

std::vector<int64_t> spatial_axes(UpgradeContext& u) {
  std::vector<int64_t> axes;
  for (int d = 2; d < u.ndim(u.input(0)); ++d) {
    axes.push_back(d);
  }
  return axes;
}

// Global pools are reductions over the spatial dims.
void upgrade_global(UpgradeContext& u, const char* reduction) {
  u.set_outputs(
      u.emit(reduction, {u.input(0)}, {{"axes", spatial_axes(u)}, {"keepdims", int64_t{1}}}));
}

void upgrade_global_lp(UpgradeContext& u) {
  const double p = u.attributes().get_float("p", 2);
  const DType dtype = u.dtype(u.input(0));
  const ValueId powers = u.op("Pow", {u.op("Abs", {u.input(0)}), u.scalar(p, dtype)});
  u.set_output(0, u.op("Pow", {u.reduce_sum(powers, spatial_axes(u)), u.scalar(1 / p, dtype)}));
}

// A permutation of distinct values: finite differences of a maximum need a gap.
Tensor distinct_values(const Shape& shape) {
  std::vector<float> values(static_cast<size_t>(num_elements(shape)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i * 7919 % values.size()) / static_cast<float>(values.size());
  }
  return Tensor::from(values, shape);
}

// A tap for each output; some point into the padding, where no gradient goes.
Tensor example_taps(const Window& window, const Shape& shape) {
  Tensor taps(pool::tap_dtype(window), shape);
  for (int64_t i = 0; i < taps.num_elements(); ++i) {
    taps.data<uint8_t>()[i] = static_cast<uint8_t>(i * 7 % num_elements(window.kernel));
  }
  return taps;
}

std::vector<OpExample> examples(const std::string& type) {
  struct Case {
    const char* name;
    Shape x, kernel, strides, dilations, pads;
    int64_t ceil_mode, count_include_pad;
    const char* layout;
  };
  const std::vector<Case> cases = {
      {"halves", {2, 4, 6, 8}, {2, 2}, {2, 2}, {1, 1}, {0, 0, 0, 0}, 0, 0, "nchw"},
      {"overlapping", {2, 2, 7, 7}, {3, 3}, {2, 2}, {1, 1}, {1, 1, 1, 1}, 0, 0, "nchw"},
      {"ceil", {1, 2, 7, 6}, {3, 3}, {2, 2}, {1, 1}, {0, 1, 0, 1}, 1, 1, "nchw"},
      {"dilated", {1, 2, 8, 8}, {2, 3}, {1, 2}, {2, 2}, {1, 0, 0, 1}, 0, 1, "nchw"},
      {"one_dim", {2, 3, 9}, {3}, {2}, {1}, {1, 0}, 0, 0, "nchw"},
      {"three_dims",
       {1, 2, 4, 4, 5},
       {2, 2, 2},
       {1, 2, 2},
       {1, 1, 1},
       {0, 0, 0, 0, 0, 1},
       0,
       0,
       "nchw"},
      {"channels_last", {2, 7, 6, 70}, {3, 3}, {2, 2}, {1, 1}, {1, 1, 1, 1}, 0, 0, "nhwc"},
  };
  std::vector<OpExample> list;
  for (const Case& c : cases) {
    OpExample example;
    example.name = c.name;
    example.attributes = {{"kernel_shape", c.kernel},
                          {"strides", c.strides},
                          {"dilations", c.dilations},
                          {"pads", c.pads},
                          {"ceil_mode", c.ceil_mode},
                          {"count_include_pad", c.count_include_pad},
                          {"layout", std::string(c.layout)}};
    const bool last = example.attributes.get_string("layout") == "nhwc";
    const ImageShape image = image_shape(c.x, last);
    const Shape out = window_output(window_of(example.attributes), image.spatial, c.ceil_mode != 0);
    const TensorType x{DType::kFloat32, c.x};
    const TensorType y{DType::kFloat32, to_shape({image.n, image.c, out}, last)};
    if (type == "AveragePoolGrad") {
      example.attributes.set("input_spatial", image.spatial);
      example.inputs = {y};
    } else if (type == "MaxPoolGrad") {
      const Window window = window_of(example.attributes);
      example.attributes.set("input_spatial", image.spatial);
      example.inputs = {{pool::tap_dtype(window), y.shape}, y};
      example.values = {example_taps(window, y.shape), Tensor()};
    } else {
      example.inputs = {x};
      if (type == "MaxPool") {
        example.values = {distinct_values(c.x)};
        example.check_gradient = {0};
      }
    }
    example.check_sharding = type != "MaxPool";  // indices count whole images
    list.push_back(std::move(example));
  }
  return list;
}

OpDef pool_op(const char* name) {
  OpDef op;
  op.name = name;
  op.infer_types = infer;
  op.cost = [](const OpContext& context) {
    const Window window = window_of(context.attributes());
    return memory_bound_cost(context, static_cast<double>(num_elements(window.kernel)));
  };
  op.sharding = sharding;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = pool::kernel_of(name, /*fast=*/false);
  op.cpu_kernel = pool::kernel_of(name, /*fast=*/true);
  op.examples = examples(name);
  return op;
}

OpDef max_pool_op() {
  OpDef op = pool_op("MaxPool");
  op.gradient = max_pool_gradient;
  op.upgrade = upgrade_max_pool;
  return op;
}

OpDef average_pool_op() {
  OpDef op = pool_op("AveragePool");
  op.gradient = average_pool_gradient;
  op.upgrade = upgrade_average_pool;
  return op;
}

const RegisterOp kMaxPool{max_pool_op()};
const RegisterOp kMaxPoolGrad{pool_op("MaxPoolGrad")};
const RegisterOp kAveragePool{average_pool_op()};
const RegisterOp kAveragePoolGrad{pool_op("AveragePoolGrad")};
const RegisterImageRule kMaxPoolImages{"MaxPool",
                                       {.form = ImageForm::kLayout, .images = {0}, .leads = true}};
const RegisterImageRule kAveragePoolImages{
    "AveragePool", {.form = ImageForm::kLayout, .images = {0}, .leads = true}};
const RegisterUpgrade kLpPool{"LpPool", upgrade_lp_pool};
const RegisterUpgrade kGlobalAverage{"GlobalAveragePool",
                                     [](UpgradeContext& u) { upgrade_global(u, "ReduceMean"); }};
const RegisterUpgrade kGlobalMax{"GlobalMaxPool",
                                 [](UpgradeContext& u) { upgrade_global(u, "ReduceMax"); }};
const RegisterUpgrade kGlobalLp{"GlobalLpPool", upgrade_global_lp};

}  // namespace

}  // namespace trainrt
