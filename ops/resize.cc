// Resize: each resized axis is a linear map with a few taps per output element, so the operator is
// a chain of sparse matrices applied axis by axis, and its gradient the transposed chain.
//
//   Resize(x)      -> y     sizes (output shape), scales (per axis), mode nearest | linear | cubic,
//                           coordinate_transformation_mode, nearest_mode, cubic_coeff_a,
//                           exclude_outside, antialias, roi (per axis: starts..., ends...),
//                           extrapolation_value
//   ResizeGrad(dy) -> dx    the same and input_shape
//
// The maps follow the text of ONNX Resize-19. Upsample (7, 9) and Resize-10 have neither coordinate
// modes nor rounding modes: they mean asymmetric coordinates, and nearest is the floor when an axis
// grows and the ceiling when it shrinks ("simple", as in opset 10's own test data). For 2 D the
// intermediate result lies in the workspace; between the first and last axis it ping-pongs there.
#include "ops/resize.h"

#include <algorithm>
#include <cmath>

#include "graph/autodiff.h"
#include "graph/upgrade.h"
#include "ops/resize_scratch.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

constexpr double kLargestSize = 1LL << 62;

// Applies one map along its axis of x (shape `shape`, which becomes that of y), or its transpose.
template <typename C>
void apply_map(
    KernelContext& op, const AxisMap& map, bool transposed, const C* x, C* y, Shape& shape) {
  const AxisView view = axis_view(shape, map.axis);
  const int64_t from = transposed ? map.out : map.in, to = transposed ? map.in : map.out;
  TRAINRT_CHECK(view.length == from);
  op.parallel_for(view.outer, row_grain(to * view.inner), [&](int64_t begin, int64_t end) {
    for (int64_t o = begin; o < end; ++o) {
      const C* source = x + o * from * view.inner;
      C* target = y + o * to * view.inner;
      std::fill(target, target + to * view.inner, C(0));
      for (int64_t i = 0; i < map.out; ++i) {
        if (!map.constant.empty() && !transposed) {
          std::fill(target + i * view.inner,
                    target + (i + 1) * view.inner,
                    static_cast<C>(map.constant[static_cast<size_t>(i)]));
        }
        for (int64_t t = 0; t < map.taps; ++t) {
          const C weight = static_cast<C>(map.weight[static_cast<size_t>(i * map.taps + t)]);
          const int64_t index = map.index[static_cast<size_t>(i * map.taps + t)];
          if (weight == C(0)) {
            continue;
          }
          const C* from_row = source + (transposed ? i : index) * view.inner;
          C* to_row = target + (transposed ? index : i) * view.inner;
          for (int64_t j = 0; j < view.inner; ++j) {
            to_row[j] += weight * from_row[j];
          }
        }
      }
    }
  });
  shape[static_cast<size_t>(map.axis)] = to;
}

// Elements of the largest intermediate tensor, counting input and output (which are converted).
int64_t buffer_elements(const ResizeProblem& p) {
  int64_t product = 1;
  for (size_t d = 0; d < p.in.size(); ++d) {
    product *= std::max(p.in[d], p.out[d]);
  }
  return product;
}

// The chain of maps over two buffers of C.
template <typename C, typename T>
void run(KernelContext& op, C* buffers) {
  const ResizeProblem p = resize_problem(op);
  const int64_t room = buffer_elements(p);
  C* current = buffers;
  C* next = buffers + room;
  Shape shape = p.transposed ? p.out : p.in;
  const T* x = op.input<T>(0);
  const int64_t count = num_elements(shape);
  for (int64_t i = 0; i < count; ++i) {
    current[i] = load<C>(x[i]);
  }
  std::vector<AxisMap> maps = resize_maps(op.attributes(), p.in, p.out);
  if (p.transposed) {
    std::reverse(maps.begin(), maps.end());
  }
  for (const AxisMap& map : maps) {
    apply_map(op, map, p.transposed, current, next, shape);
    std::swap(current, next);
  }
  T* y = op.output<T>(0);
  const int64_t total = num_elements(shape);
  for (int64_t i = 0; i < total; ++i) {
    y[i] = store<T>(current[i]);
  }
}

void reference(KernelContext& op) {
  std::vector<double> buffers(static_cast<size_t>(2 * buffer_elements(resize_problem(op))));
  dispatch_real(op.input_dtype(0),
                [&](auto tag) { run<double, decltype(tag)>(op, buffers.data()); });
}

void fast(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) {
    using C = Compute<decltype(tag)>;
    run<C, decltype(tag)>(op, reinterpret_cast<C*>(op.workspace().data()));
  });
}

int64_t workspace(const OpContext& op, const DeviceSpec& spec) {
  if (spec.backend == Backend::kCuda) {
    const ResizeProblem p = resize_problem(op);
    return 2 * resize_buffer_bytes(p, op.input_dtype(0)) +
           static_cast<int64_t>(resize_tables(p, op.attributes()).blob.size());
  }
  const int64_t bytes = op.input_dtype(0) == DType::kFloat64 ? 8 : 4;
  return 2 * bytes * buffer_elements(resize_problem(op));
}

// ---- description -----------------------------------------------------------------------------

TensorTypes infer(const OpContext& op) {
  require_real(op);
  const ResizeProblem p = resize_problem(op);
  TRAINRT_REQUIRE(p.in.size() == p.out.size(),
                  kInvalidModel,
                  op.node().op_type,
                  ": sizes ",
                  shape_string(p.out),
                  " for an input of shape ",
                  shape_string(p.in));
  for (size_t d = 0; d < p.in.size(); ++d) {
    TRAINRT_REQUIRE(p.in[d] > 0 ? p.out[d] > 0 : p.out[d] == p.in[d],
                    kInvalidModel,
                    op.node().op_type,
                    ": axis ",
                    d,
                    " of ",
                    shape_string(p.in),
                    " cannot become one of size ",
                    p.out[d]);
  }
  return {{op.input_dtype(0), p.transposed ? p.in : p.out}};
}

// Axes that stay as they are may be split.
ShardingRule sharding(const OpContext& op) {
  const ResizeProblem p = resize_problem(op);
  std::vector<bool> changed(p.in.size(), false);
  for (const AxisMap& map : resize_maps(op.attributes(), p.in, p.out)) {
    changed[static_cast<size_t>(map.axis)] = true;
  }
  std::string from, to;
  for (size_t d = 0; d < p.in.size(); ++d) {
    from += concat(changed[d] ? "s" : "b", d, " ");
    to += concat(changed[d] ? "o" : "b", d, " ");
  }
  Factors factors(op, p.transposed ? concat(to, " -> ", from) : concat(from, " -> ", to));
  for (size_t d = 0; d < p.in.size(); ++d) {
    if (changed[d]) {
      factors.whole(concat("s", d)).whole(concat("o", d));
    }
  }
  if (op.attributes().get_float("extrapolation_value", 0) == 0) {
    factors.linear({{0}});
  }
  return factors;
}

// sizes and input_shape count whole dims: those of a split axis follow the shard.
Attributes localize(const OpContext& op, const FactorShard& shard) {
  Attributes attributes = op.attributes();
  const ShardingRule rule = sharding(op);
  for (const char* name : {"sizes", "input_shape"}) {
    if (!attributes.has(name)) {
      continue;
    }
    Shape shape = attributes.get_ints(name);
    for (size_t d = 0; d < shape.size(); ++d) {
      if (rule.outputs[0][d] == DimFactors{shard.factor}) {
        shape[d] = shard.size;
      }
    }
    attributes.set(name, shape);
  }
  return attributes;
}

// Scales and sizes name all axes, or those of attribute `axes` (opset 18).
template <typename T>
std::vector<T> spread(UpgradeContext& u, const std::vector<T>& given, std::vector<T> all) {
  const int ndim = u.ndim(u.input(0));
  std::vector<int64_t> axes = u.attributes().get_ints("axes", {});
  if (axes.empty()) {
    for (int d = 0; d < ndim; ++d) {
      axes.push_back(d);
    }
  }
  const size_t parts = all.size() / static_cast<size_t>(ndim);  // 2 for a roi
  if (given.size() != axes.size() * parts) {
    u.fail(concat(
        "scales, sizes or roi have ", given.size(), " entries, wanted ", axes.size() * parts));
  }
  for (size_t part = 0; part < parts; ++part) {
    for (size_t i = 0; i < axes.size(); ++i) {
      all[part * static_cast<size_t>(ndim) + static_cast<size_t>(normalize_axis(axes[i], ndim))] =
          given[part * axes.size() + i];
    }
  }
  return all;
}

// keep_aspect_ratio_policy (opset 18): one scale for all resized axes.
void keep_aspect_ratio(UpgradeContext& u,
                       const Shape& in,
                       Shape& sizes,
                       std::vector<double>& scales) {
  const std::string policy = u.attributes().get_string("keep_aspect_ratio_policy", "stretch");
  if (policy == "stretch") {
    return;
  }
  std::vector<int64_t> axes = u.attributes().get_ints("axes", {});
  for (size_t d = 0; axes.empty() && d < in.size(); ++d) {
    axes.push_back(static_cast<int64_t>(d));
  }
  double scale = 0;
  for (const int64_t axis : axes) {
    const size_t d = static_cast<size_t>(normalize_axis(axis, static_cast<int>(in.size())));
    const double ratio = static_cast<double>(sizes[d]) / static_cast<double>(in[d]);
    scale = scale == 0               ? ratio
            : policy == "not_larger" ? std::min(scale, ratio)
                                     : std::max(scale, ratio);
  }
  for (const int64_t axis : axes) {
    const size_t d = static_cast<size_t>(normalize_axis(axis, static_cast<int>(in.size())));
    scales[d] = scale;
    sizes[d] = static_cast<int64_t>(std::floor(scale * static_cast<double>(in[d]) + 0.5));
  }
}

std::vector<double> floats_of(UpgradeContext& u, int input) {
  const std::optional<Tensor> tensor = u.constant_input(input);
  if (!tensor) {
    u.fail(concat("input ", input, " must be known when the model is imported"));
  }
  return tensor->to_double();
}

bool has_elements(UpgradeContext& u, int input) {
  return u.has_input(input) && num_elements(u.shape(u.input(input))) > 0;
}

void copy_modes(UpgradeContext& u, Attributes& attributes) {
  std::string mode = u.attributes().get_string("mode", "nearest");
  attributes.set("mode", mode == "bilinear" || mode == "trilinear" ? std::string("linear") : mode);
  if (u.opset() < 11) {  // Upsample and Resize-10
    attributes.set("coordinate_transformation_mode", std::string("asymmetric"));
    attributes.set("nearest_mode", std::string("simple"));
    return;
  }
  for (const char* name : {"coordinate_transformation_mode", "nearest_mode"}) {
    if (u.attributes().has(name)) {
      attributes.set(name, u.attributes().get_string(name));
    }
  }
  for (const char* name : {"cubic_coeff_a", "extrapolation_value"}) {
    if (u.attributes().has(name)) {
      attributes.set(name, u.attributes().get_float(name));
    }
  }
  for (const char* name : {"exclude_outside", "antialias"}) {
    if (u.attributes().get_int(name, 0) != 0) {
      attributes.set(name, int64_t{1});
    }
  }
}

void upgrade(UpgradeContext& u) {
  const Shape in = u.shape(u.input(0));
  TRAINRT_REQUIRE(!in.empty(), kInvalidModel, "a scalar has no axis to resize");
  Attributes attributes;
  copy_modes(u, attributes);
  const bool with_roi = u.op_type() == "Resize" && u.opset() >= 11;
  const int scales_input = with_roi ? 2 : 1;
  std::vector<double> scales(in.size(), 1.0);
  Shape sizes = in;
  if (u.op_type() == "Upsample" && u.opset() < 9) {
    scales = spread(u, u.attributes().get_floats("scales", {}), scales);
  } else if (has_elements(u, scales_input)) {
    scales = spread(u, floats_of(u, scales_input), scales);
  } else if (with_roi && u.has_input(3)) {
    sizes = spread(u, u.int_input(3), sizes);
    for (size_t d = 0; d < in.size(); ++d) {
      scales[d] = static_cast<double>(sizes[d]) / static_cast<double>(in[d]);
    }
    keep_aspect_ratio(u, in, sizes, scales);
    attributes.set("sizes", sizes);
  } else {
    u.fail("neither scales nor sizes are given");
  }
  const std::string coordinates =
      attributes.get_string("coordinate_transformation_mode", "half_pixel");
  std::vector<double> roi(2 * in.size(), 0.0);
  std::fill(roi.begin() + static_cast<std::ptrdiff_t>(in.size()), roi.end(), 1.0);
  if (coordinates == "tf_crop_and_resize" && has_elements(u, 1)) {
    roi = spread(u, floats_of(u, 1), roi);
    attributes.set("roi", roi);
  }
  if (!attributes.has("sizes")) {
    for (size_t d = 0; d < in.size(); ++d) {
      const double extent = coordinates == "tf_crop_and_resize" ? roi[d + in.size()] - roi[d] : 1.0;
      const double size = std::floor(static_cast<double>(in[d]) * extent * scales[d]);
      TRAINRT_REQUIRE(scales[d] > 0 && size >= 0 && size < kLargestSize,
                      kInvalidModel,
                      "axis ",
                      d,
                      " of size ",
                      in[d],
                      " cannot be resized by ",
                      scales[d],
                      extent == 1 ? "" : concat(" of an extent of ", extent),
                      "; wanted a positive scale, and fewer than 2^62 elements");
      sizes[d] = static_cast<int64_t>(size);
    }
    attributes.set("sizes", sizes);
  }
  attributes.set("scales", scales);
  u.set_outputs(u.emit("Resize", {u.input(0)}, attributes));
}

std::vector<OpExample> examples(bool grad) {
  struct Case {
    const char *name, *mode, *coordinates;
    Shape in, out;
    int64_t antialias;
  };
  const std::vector<Case> cases = {
      {"nearest_double", "nearest", "asymmetric", {2, 3, 4, 5}, {2, 3, 8, 10}, 0},
      {"linear_half_pixel", "linear", "half_pixel", {2, 2, 5, 4}, {2, 2, 8, 3}, 0},
      {"linear_align_corners", "linear", "align_corners", {2, 2, 5, 4}, {2, 2, 9, 7}, 0},
      {"cubic", "cubic", "half_pixel", {1, 2, 5, 6}, {1, 2, 8, 9}, 0},
      {"antialias", "linear", "half_pixel", {1, 2, 9, 8}, {1, 2, 4, 4}, 1},
  };
  std::vector<OpExample> list;
  for (const Case& c : cases) {
    std::vector<double> scales;
    for (size_t d = 0; d < c.in.size(); ++d) {
      scales.push_back(static_cast<double>(c.out[d]) / static_cast<double>(c.in[d]));
    }
    OpExample example;
    example.name = c.name;
    example.attributes = {{"sizes", c.out},
                          {"scales", scales},
                          {"mode", std::string(c.mode)},
                          {"coordinate_transformation_mode", std::string(c.coordinates)},
                          {"antialias", c.antialias}};
    if (grad) {
      example.attributes.set("input_shape", c.in);
    }
    example.inputs = {{DType::kFloat32, grad ? c.out : c.in}};
    list.push_back(std::move(example));
  }
  return list;
}

OpDef resize_op(const char* name, bool grad) {
  OpDef op;
  op.name = name;
  op.infer_types = infer;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 8); };
  op.sharding = sharding;
  op.localize = localize;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = reference;
  op.workspace = workspace;
  op.cpu_kernel = fast;
  op.examples = examples(grad);
  if (!grad) {
    op.gradient = [](GradientBuilder& g) {
      Attributes attributes = g.attributes();
      attributes.set("input_shape", g.input_shape(0));
      g.set_input_grad(0, g.op("ResizeGrad", {g.output_grad(0)}, attributes));
    };
    op.upgrade = upgrade;
  }
  return op;
}

const RegisterOp kResize{resize_op("Resize", false)};
const RegisterOp kResizeGrad{resize_op("ResizeGrad", true)};
const RegisterUpgrade kUpsample{"Upsample", upgrade};

}  // namespace

}  // namespace trainrt
