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
// modes nor rounding modes: they mean asymmetric coordinates and floor. For 2 D the intermediate
// result lies in the workspace; between the first and last axis it ping-pongs there.
#include <algorithm>
#include <cmath>

#include "graph/autodiff.h"
#include "graph/upgrade.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

// y[i] = sum over taps t of weight[i][t] x[index[i][t]] + constant[i].
struct AxisMap {
  int axis = 0;
  int64_t in = 1, out = 1, taps = 1;
  std::vector<int64_t> index;
  std::vector<double> weight;
  std::vector<double> constant;  // extrapolation; empty: none
};

double cubic_weight(double distance, double a) {
  const double t = std::fabs(distance);
  if (t <= 1) {
    return ((a + 2) * t - (a + 3)) * t * t + 1;
  }
  return t < 2 ? ((a * t - 5 * a) * t + 8 * a) * t - 4 * a : 0;
}

double linear_weight(double distance) {
  return std::max(0.0, 1 - std::fabs(distance));
}

// Everything that a map of one axis depends on.
struct AxisSpec {
  std::string mode, coordinates, rounding;
  double scale = 1, cubic_a = -0.75, roi_start = 0, roi_end = 1, extrapolation = 0;
  bool exclude_outside = false, antialias = false;
};

// The position in x of output element i.
double source_position(const AxisSpec& s, int64_t i, int64_t in, int64_t out) {
  const double x = static_cast<double>(i);
  const double n = static_cast<double>(in);
  const double m = static_cast<double>(out);
  if (s.coordinates == "asymmetric") {
    return x / s.scale;
  }
  if (s.coordinates == "align_corners") {
    // The fractional size, as ONNX computes it: it differs from `out` where scales were given.
    return out == 1 ? 0 : x * (n - 1) / (s.scale * n - 1);
  }
  if (s.coordinates == "pytorch_half_pixel") {
    return out == 1 ? 0 : (x + 0.5) / s.scale - 0.5;
  }
  if (s.coordinates == "half_pixel_symmetric") {
    // The output's centre is held where an output of the exact fractional size would have it.
    const double adjustment = m / (s.scale * n);
    const double offset = n / 2 * (1 - adjustment);
    return offset + (x + 0.5) / s.scale - 0.5;
  }
  if (s.coordinates == "tf_half_pixel_for_nn") {
    return (x + 0.5) / s.scale;
  }
  if (s.coordinates == "tf_crop_and_resize") {
    return out == 1 ? 0.5 * (s.roi_start + s.roi_end) * (n - 1)
                    : s.roi_start * (n - 1) + x * (s.roi_end - s.roi_start) * (n - 1) / (m - 1);
  }
  return (x + 0.5) / s.scale - 0.5;  // half_pixel
}

int64_t round_position(const std::string& rounding, double x) {
  if (rounding == "floor") {
    return static_cast<int64_t>(std::floor(x));
  }
  if (rounding == "ceil") {
    return static_cast<int64_t>(std::ceil(x));
  }
  return static_cast<int64_t>(rounding == "round_prefer_ceil" ? std::floor(x + 0.5)
                                                              : std::ceil(x - 0.5));
}

AxisMap nearest_map(const AxisSpec& s, int axis, int64_t in, int64_t out) {
  AxisMap map{axis, in, out, 1, {}, {}, {}};
  for (int64_t i = 0; i < out; ++i) {
    const int64_t position = round_position(s.rounding, source_position(s, i, in, out));
    map.index.push_back(std::clamp<int64_t>(position, 0, in - 1));
    map.weight.push_back(1);
  }
  return map;
}

// Linear and cubic: taps around the position; antialias stretches the filter when shrinking.
AxisMap filter_map(const AxisSpec& s, int axis, int64_t in, int64_t out) {
  const bool cubic = s.mode == "cubic";
  const double stretch = s.antialias && s.scale < 1 ? 1 / s.scale : 1;
  const double radius = (cubic ? 2 : 1) * stretch;
  AxisMap map{axis, in, out, 2 * static_cast<int64_t>(std::ceil(radius)), {}, {}, {}};
  for (int64_t i = 0; i < out; ++i) {
    const double x = source_position(s, i, in, out);
    const int64_t first = static_cast<int64_t>(std::floor(x)) - map.taps / 2 + 1;
    double sum = 0;
    for (int64_t t = 0; t < map.taps; ++t) {
      const double distance = (x - static_cast<double>(first + t)) / stretch;
      const bool outside = first + t < 0 || first + t >= in;
      double weight = cubic ? cubic_weight(distance, s.cubic_a) : linear_weight(distance);
      weight = outside && (s.exclude_outside || s.antialias) ? 0 : weight;
      sum += weight;
      map.index.push_back(std::clamp<int64_t>(first + t, 0, in - 1));
      map.weight.push_back(weight);
    }
    for (int64_t t = 0; t < map.taps && sum != 0; ++t) {
      map.weight[map.weight.size() - 1 - static_cast<size_t>(t)] /= sum;
    }
  }
  return map;
}

AxisMap make_map(const AxisSpec& s, int axis, int64_t in, int64_t out) {
  AxisMap map = s.mode == "nearest" ? nearest_map(s, axis, in, out) : filter_map(s, axis, in, out);
  if (s.coordinates == "tf_crop_and_resize") {
    map.constant.assign(static_cast<size_t>(out), 0.0);
    for (int64_t i = 0; i < out; ++i) {
      const double x = source_position(s, i, in, out);
      if (x < 0 || x > static_cast<double>(in - 1)) {
        map.constant[static_cast<size_t>(i)] = s.extrapolation;
        for (int64_t t = 0; t < map.taps; ++t) {
          map.weight[static_cast<size_t>(i * map.taps + t)] = 0;
        }
      }
    }
  }
  return map;
}

// The maps of all axes that change anything, first axis first.
std::vector<AxisMap> maps_of(const Attributes& attributes, const Shape& in, const Shape& out) {
  AxisSpec s;
  s.mode = attributes.get_string("mode", "nearest");
  s.coordinates = attributes.get_string("coordinate_transformation_mode", "half_pixel");
  s.rounding = attributes.get_string("nearest_mode", "round_prefer_floor");
  s.cubic_a = attributes.get_float("cubic_coeff_a", -0.75);
  s.exclude_outside = attributes.get_int("exclude_outside", 0) != 0;
  s.antialias = attributes.get_int("antialias", 0) != 0;
  s.extrapolation = attributes.get_float("extrapolation_value", 0);
  const std::vector<double> scales = attributes.get_floats("scales", {});
  const std::vector<double> roi = attributes.get_floats("roi", {});
  std::vector<AxisMap> maps;
  for (size_t d = 0; d < in.size(); ++d) {
    s.scale =
        d < scales.size() ? scales[d] : static_cast<double>(out[d]) / static_cast<double>(in[d]);
    s.roi_start = roi.size() == 2 * in.size() ? roi[d] : 0;
    s.roi_end = roi.size() == 2 * in.size() ? roi[d + in.size()] : 1;
    const bool crops =
        s.coordinates == "tf_crop_and_resize" && (s.roi_start != 0 || s.roi_end != 1);
    if (in[d] != out[d] || s.scale != 1 || crops) {
      maps.push_back(make_map(s, static_cast<int>(d), in[d], out[d]));
    }
  }
  return maps;
}

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

struct Problem {
  Shape in, out;  // of the forward operator
  bool transposed = false;
};

template <typename Context>
Problem problem_of(const Context& op) {
  if (op.node().op_type == "ResizeGrad") {
    return {op.attributes().get_ints("input_shape"), op.input_shape(0), true};
  }
  return {op.input_shape(0), op.attributes().get_ints("sizes"), false};
}

// Elements of the largest intermediate tensor, counting input and output (which are converted).
int64_t buffer_elements(const Problem& p) {
  int64_t product = 1;
  for (size_t d = 0; d < p.in.size(); ++d) {
    product *= std::max(p.in[d], p.out[d]);
  }
  return product;
}

// The chain of maps over two buffers of C.
template <typename C, typename T>
void run(KernelContext& op, C* buffers) {
  const Problem p = problem_of(op);
  const int64_t room = buffer_elements(p);
  C* current = buffers;
  C* next = buffers + room;
  Shape shape = p.transposed ? p.out : p.in;
  const T* x = op.input<T>(0);
  const int64_t count = num_elements(shape);
  for (int64_t i = 0; i < count; ++i) {
    current[i] = load<C>(x[i]);
  }
  std::vector<AxisMap> maps = maps_of(op.attributes(), p.in, p.out);
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
  std::vector<double> buffers(static_cast<size_t>(2 * buffer_elements(problem_of(op))));
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
  const int64_t bytes = op.input_dtype(0) == DType::kFloat64 ? 8 : 4;
  return spec.backend == Backend::kCpu ? 2 * bytes * buffer_elements(problem_of(op)) : 0;
}

// ---- description -----------------------------------------------------------------------------

TensorTypes infer(const OpContext& op) {
  require_real(op);
  const Problem p = problem_of(op);
  TRAINRT_REQUIRE(p.in.size() == p.out.size(),
                  kInvalidModel,
                  op.node().op_type,
                  ": sizes ",
                  shape_string(p.out),
                  " for an input of shape ",
                  shape_string(p.in));
  return {{op.input_dtype(0), p.transposed ? p.in : p.out}};
}

// Axes that stay as they are may be split.
ShardingRule sharding(const OpContext& op) {
  const Problem p = problem_of(op);
  std::vector<bool> changed(p.in.size(), false);
  for (const AxisMap& map : maps_of(op.attributes(), p.in, p.out)) {
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
    attributes.set("nearest_mode", std::string("floor"));
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
      sizes[d] = static_cast<int64_t>(std::floor(static_cast<double>(in[d]) * extent * scales[d]));
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
