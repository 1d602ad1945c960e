// GroupNormalization (Wu & He, 2018) over x [n, c, spatial...]: each of `num_groups` groups of
// channels of a sample is normalized, then scaled per channel. InstanceNormalization is the case of
// one channel per group.
//
//   GroupNorm(x, scale, bias)                  -> y, mean, inv_std     mean, inv_std: [n, groups],
//   GroupNormGrad(dy, x, scale, mean, inv_std) -> dx, dscale, dbias    float32 for 16-bit x
//
// x is [n, spatial..., c] where `layout` is "nhwc". With h = (x - mean) inv_std: per (sample,
// channel) the sums of dy and dy h go to the workspace; from them follow the sums of a group
// (weighted by scale) and, over samples in order, dscale, dbias.
#include "ops/group_norm.h"

#include <cmath>

#include "graph/autodiff.h"
#include "graph/passes/layout.h"
#include "graph/upgrade.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

using group_norm::GroupView;
using group_norm::Scratch;
using group_norm::view_of;

// ---- channels last ---------------------------------------------------------------------------

// Sums over the positions of each image of two terms per channel: out is [n][2][c].
template <typename Term>
void image_sums(
    KernelContext& op, const GroupView& v, const Scratch& scratch, double* room, const Term& term) {
  const int64_t c = v.c();
  op.parallel_for(v.n * scratch.parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      double* sums = room + 2 * k * c;
      std::fill(sums, sums + 2 * c, 0.0);
      const int64_t n = k / scratch.parts, first = k % scratch.parts * scratch.part;
      for (int64_t p = first; p < std::min(v.s, first + scratch.part); ++p) {
        const int64_t row = (n * v.s + p) * c;
#pragma omp simd
        for (int64_t j = 0; j < c; ++j) {
          double a, b;
          term(row + j, n * c + j, a, b);
          sums[j] += a;
          sums[c + j] += b;
        }
      }
    }
  });
  double* out = room + scratch.sums();
  for (int64_t n = 0; n < v.n; ++n) {
    for (int64_t i = 0; i < 2 * c; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < scratch.parts; ++k) {
        sum += room[2 * (n * scratch.parts + k) * c + i];
      }
      out[2 * n * c + i] = sum;
    }
  }
}

// out[i] = value(i, the channel's place in arrays [n][c]).
template <typename T, typename Value>
void map_rows(KernelContext& op, const GroupView& v, T* out, const Value& value) {
  const int64_t c = v.c();
  op.parallel_for(v.n * v.s, row_grain(c), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t numbers = row / v.s * c;
#pragma omp simd
      for (int64_t j = 0; j < c; ++j) {
        out[row * c + j] = value(row * c + j, numbers + j);
      }
    }
  });
}

// Sum of entry(channel) over the channels of a group of an image.
template <typename Entry>
double group_sum(const GroupView& v, int64_t group, const Entry& entry) {
  double sum = 0;
  for (int64_t k = 0; k < v.channels; ++k) {
    sum += entry(group * v.channels + k);
  }
  return sum;
}

template <typename C, typename T>
void forward_last(KernelContext& op, double* room) {
  using S = Compute<T>;
  const GroupView v = view_of(op);
  const Scratch scratch = group_norm::cpu_scratch(v);
  const int64_t c = v.c();
  const double epsilon = op.attributes().get_float("epsilon", 1e-5);
  const double count = static_cast<double>(v.length());
  const T *x = op.input<T>(0), *scale = op.input<T>(1), *bias = op.input<T>(2);
  const double* sums = room + scratch.sums();
  double* numbers = room + scratch.numbers();
  double *mean = numbers, *factor = numbers + v.n * c, *shift = factor + v.n * c;
  const auto for_each_group = [&](const auto& fn) {
    for (int64_t row = 0; row < v.n * v.groups; ++row) {
      fn(row, row / v.groups, row % v.groups);
    }
  };
  image_sums(op, v, scratch, room, [x](int64_t i, int64_t, double& a, double& b) {
    a = load<double>(x[i]);
    b = 0;
  });
  for_each_group([&](int64_t, int64_t n, int64_t group) {
    const double value =
        group_sum(v, group, [&](int64_t channel) { return sums[2 * n * c + channel]; }) / count;
    std::fill_n(mean + n * c + group * v.channels, v.channels, value);
  });
  image_sums(op, v, scratch, room, [x, mean](int64_t i, int64_t at, double& a, double& b) {
    const double d = load<double>(x[i]) - mean[at];
    a = d * d;
    b = 0;
  });
  for_each_group([&](int64_t row, int64_t n, int64_t group) {
    const double square =
        group_sum(v, group, [&](int64_t channel) { return sums[2 * n * c + channel]; });
    const double inv = 1 / std::sqrt(square / count + epsilon);
    if (S* mean_out = op.output<S>(1)) {
      mean_out[row] = v.channels == 0 ? S(NAN) : static_cast<S>(mean[n * c + group * v.channels]);
    }
    if (S* inv_out = op.output<S>(2)) {
      inv_out[row] = static_cast<S>(inv);
    }
    for (int64_t channel = group * v.channels; channel < (group + 1) * v.channels; ++channel) {
      factor[n * c + channel] = inv * load<double>(scale[channel]);
      shift[n * c + channel] = load<double>(bias[channel]);
    }
  });
  map_rows(op, v, op.output<T>(0), [=](int64_t i, int64_t at) {
    return store<T>((load<C>(x[i]) - static_cast<C>(mean[at])) * static_cast<C>(factor[at]) +
                    static_cast<C>(shift[at]));
  });
}

// dbias and dscale: sums of images in order, the latter `n_stride` / 2 behind the former.
template <typename T>
void add_images(KernelContext& op, const GroupView& v, const double* sums, int64_t n_stride) {
  for (int64_t channel = 0; channel < v.c(); ++channel) {
    double dbias = 0, dscale = 0;
    for (int64_t n = 0; n < v.n; ++n) {
      dbias += sums[n * n_stride + channel];
      dscale += sums[n * n_stride + n_stride / 2 + channel];
    }
    if (op.has_output(1)) {
      op.output<T>(1)[channel] = store<T>(dscale);
    }
    if (op.has_output(2)) {
      op.output<T>(2)[channel] = store<T>(dbias);
    }
  }
}

// dx = factor dy - (x slope + shift), numbers of a channel of an image.
template <typename C, typename T>
void backward_last(KernelContext& op, double* room) {
  using S = Compute<T>;
  const GroupView v = view_of(op);
  const Scratch scratch = group_norm::cpu_scratch(v);
  const int64_t c = v.c();
  const double count = static_cast<double>(v.length());
  const T *dy = op.input<T>(0), *x = op.input<T>(1), *scale = op.input<T>(2);
  const S *mean = op.input<S>(3), *inv = op.input<S>(4);
  const double* sums = room + scratch.sums();
  double* numbers = room + scratch.numbers();
  double *factor = numbers, *slope = numbers + v.n * c, *shift = slope + v.n * c;
  for (int64_t at = 0; at < v.n * c; ++at) {  // h = (x - shift) slope, for the sums
    const int64_t row = at / v.channels;
    slope[at] = static_cast<double>(inv[row]);
    shift[at] = static_cast<double>(mean[row]);
  }
  image_sums(op, v, scratch, room, [=](int64_t i, int64_t at, double& a, double& b) {
    a = load<double>(dy[i]);
    b = a * ((load<double>(x[i]) - shift[at]) * slope[at]);
  });
  if (op.has_output(1) || op.has_output(2)) {
    add_images<T>(op, v, sums, 2 * c);
  }
  for (int64_t row = 0; row < v.n * v.groups; ++row) {
    const int64_t n = row / v.groups, group = row % v.groups;
    const double* of = sums + 2 * n * c;
    const auto weighted = [&](int64_t which) {
      return group_sum(v,
                       group,
                       [&](int64_t channel) {
                         return load<double>(scale[channel]) * of[which * c + channel];
                       }) /
             count;
    };
    const double mean_g = weighted(0), mean_gh = weighted(1);
    const double k = static_cast<double>(inv[row]);
    for (int64_t channel = group * v.channels; channel < (group + 1) * v.channels; ++channel) {
      const int64_t at = n * c + channel;
      factor[at] = k * load<double>(scale[channel]);
      slope[at] = k * k * mean_gh;
      shift[at] = k * mean_g - static_cast<double>(mean[row]) * slope[at];
    }
  }
  if (T* dx = op.output<T>(0)) {
    map_rows(op, v, dx, [=](int64_t i, int64_t at) {
      return store<T>(load<C>(dy[i]) * static_cast<C>(factor[at]) -
                      (load<C>(x[i]) * static_cast<C>(slope[at]) + static_cast<C>(shift[at])));
    });
  }
}

// ---- planes of a channel ---------------------------------------------------------------------

// C is double in the reference kernel.
template <typename C, typename T>
void forward(KernelContext& op) {
  const GroupView v = view_of(op);
  const double epsilon = op.attributes().get_float("epsilon", 1e-5);
  const T* scale = op.input<T>(1);
  const T* bias = op.input<T>(2);
  using S = Compute<T>;
  S* mean_out = op.output<S>(1);
  S* inv_out = op.output<S>(2);
  op.parallel_for(v.n * v.groups, row_grain(v.length()), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = op.input<T>(0) + row * v.length();
      T* y = op.output<T>(0) + row * v.length();
      double sum = 0, square = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < v.length(); ++i) {
        sum += load<double>(x[i]);
      }
      const double mean = sum / static_cast<double>(v.length());
#pragma omp simd reduction(+ : square)
      for (int64_t i = 0; i < v.length(); ++i) {
        const double d = load<double>(x[i]) - mean;
        square += d * d;
      }
      const double inv = 1 / std::sqrt(square / static_cast<double>(v.length()) + epsilon);
      if (mean_out != nullptr) {
        mean_out[row] = static_cast<S>(mean);
      }
      if (inv_out != nullptr) {
        inv_out[row] = static_cast<S>(inv);
      }
      for (int64_t k = 0; k < v.channels; ++k) {
        const int64_t channel = row % v.groups * v.channels + k;
        const C factor = static_cast<C>(inv) * load<C>(scale[channel]);
        const C shift = load<C>(bias[channel]), center = static_cast<C>(mean);
#pragma omp simd
        for (int64_t i = k * v.s; i < (k + 1) * v.s; ++i) {
          y[i] = store<T>((load<C>(x[i]) - center) * factor + shift);
        }
      }
    }
  });
}

// sums: [n][c][2].
template <typename C, typename T>
void backward(KernelContext& op, double* sums) {
  const GroupView v = view_of(op);
  using S = Compute<T>;
  const T* scale = op.input<T>(2);
  T* dx_out = op.output<T>(0);
  const double count = static_cast<double>(v.length());
  op.parallel_for(v.n * v.groups, row_grain(v.length()), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* dy = op.input<T>(0) + row * v.length();
      const T* x = op.input<T>(1) + row * v.length();
      const C mean = op.input<S>(3)[row], inv = op.input<S>(4)[row];
      double group_dy = 0, group_dyh = 0;
      for (int64_t k = 0; k < v.channels; ++k) {
        double sum_dy = 0, sum_dyh = 0;
#pragma omp simd reduction(+ : sum_dy, sum_dyh)
        for (int64_t i = k * v.s; i < (k + 1) * v.s; ++i) {
          const C g = load<C>(dy[i]);
          sum_dy += static_cast<double>(g);
          sum_dyh += static_cast<double>(g * ((load<C>(x[i]) - mean) * inv));
        }
        const double factor = load<double>(scale[row % v.groups * v.channels + k]);
        group_dy += factor * sum_dy;
        group_dyh += factor * sum_dyh;
        sums[2 * (row * v.channels + k)] = sum_dy;
        sums[2 * (row * v.channels + k) + 1] = sum_dyh;
      }
      const C mean_g = static_cast<C>(group_dy / count),
              mean_gh = static_cast<C>(group_dyh / count);
      for (int64_t k = 0; dx_out != nullptr && k < v.channels; ++k) {
        const C factor = load<C>(scale[row % v.groups * v.channels + k]);
        T* dx = dx_out + row * v.length();
#pragma omp simd
        for (int64_t i = k * v.s; i < (k + 1) * v.s; ++i) {
          const C h = (load<C>(x[i]) - mean) * inv;
          dx[i] = store<T>(inv * (load<C>(dy[i]) * factor - mean_g - h * mean_gh));
        }
      }
    }
  });
  for (int64_t channel = 0; channel < v.c(); ++channel) {
    double dscale = 0, dbias = 0;
    for (int64_t n = 0; n < v.n; ++n) {
      dbias += sums[2 * (n * v.c() + channel)];
      dscale += sums[2 * (n * v.c() + channel) + 1];
    }
    if (op.has_output(1)) {
      op.output<T>(1)[channel] = store<T>(dscale);
    }
    if (op.has_output(2)) {
      op.output<T>(2)[channel] = store<T>(dbias);
    }
  }
}

// Of the kernels on the CPU, and of those on CUDA.
int64_t workspace(const OpContext& op, const DeviceSpec& spec) {
  const GroupView v = view_of(op);
  if (v.last) {
    return (spec.backend == Backend::kCpu ? group_norm::cpu_scratch(v)
                                          : group_norm::device_scratch(v))
        .bytes();
  }
  const bool needs_sums = spec.backend == Backend::kCpu && op.node().op_type == "GroupNormGrad";
  return needs_sums ? 2 * v.n * v.c() * static_cast<int64_t>(sizeof(double)) : 0;
}

template <typename C, typename T>
void run(KernelContext& op, double* room) {
  const bool last = view_of(op).last;
  if (op.node().op_type == "GroupNormGrad") {
    last ? backward_last<C, T>(op, room) : backward<C, T>(op, room);
  } else {
    last ? forward_last<C, T>(op, room) : forward<C, T>(op);
  }
}

void run_reference(KernelContext& op) {
  const GroupView v = view_of(op);
  std::vector<double> room(
      static_cast<size_t>(v.last ? group_norm::cpu_scratch(v).bytes() / 8 : 2 * v.n * v.c()));
  dispatch_real(op.input_dtype(0), [&](auto tag) { run<double, decltype(tag)>(op, room.data()); });
}

void run_fast(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) {
    run<Compute<decltype(tag)>, decltype(tag)>(op,
                                               reinterpret_cast<double*>(op.workspace().data()));
  });
}

TensorTypes infer_forward(const OpContext& op) {
  require_real(op);
  const GroupView v = view_of(op);
  for (int i = 1; i < 3; ++i) {
    TRAINRT_REQUIRE(op.input_type(i) == (TensorType{op.input_dtype(0), {v.c()}}),
                    kInvalidModel,
                    "GroupNorm: ",
                    i == 1 ? "scale" : "bias",
                    " is ",
                    dtype_name(op.input_dtype(i)),
                    shape_string(op.input_shape(i)),
                    ", wanted ",
                    dtype_name(op.input_dtype(0)),
                    "[",
                    v.c(),
                    "]");
  }
  const TensorType statistics{statistic_dtype(op.input_dtype(0)), {v.n, v.groups}};
  return {op.input_type(0), statistics, statistics};
}

TensorTypes infer_backward(const OpContext& op) {
  const GroupView v = view_of(op);
  require_statistics(op, 3, {statistic_dtype(op.input_dtype(1)), {v.n, v.groups}});
  return {op.input_type(1), op.input_type(2), op.input_type(2)};
}

ShardingRule sharding(const OpContext& op) {
  const bool grad = op.node().op_type == "GroupNormGrad";
  const GroupView v = view_of(op);
  const int ndim = static_cast<int>(op.input_shape(grad ? 1 : 0).size());
  std::string x = v.last ? "n" : "n (g c)";
  for (int d = 2; d < ndim; ++d) {
    x += concat(" s", d);
  }
  x += v.last ? " (g c)" : "";
  Factors factors(op,
                  grad ? concat(x, ", ", x, ", (g c), n g, n g -> ", x, ", (g c), (g c)")
                       : concat(x, ", (g c), (g c) -> ", x, ", n g, n g"));
  factors.size("g", v.groups).size("c", v.channels).whole("c");
  for (int d = 2; d < ndim; ++d) {
    factors.whole(concat("s", d));
  }
  if (grad) {
    factors.reduction("n").linear({{0}});
  }
  return factors;
}

Attributes localize(const OpContext& op, const FactorShard& shard) {
  Attributes attributes = op.attributes();
  if (shard.factor == sharding(op).find("g")) {
    attributes.set("num_groups", shard.size);
  }
  return attributes;
}

// Mean and inv_std are outputs for the gradient's sake alone; no ONNX operator exposes them, but
// their derivatives (as in LayerNormalization) keep the rule complete.
ValueId through_statistics(GradientBuilder& g) {
  if (g.output_grad(1) == kNoValue && g.output_grad(2) == kNoValue) {
    return kNoValue;
  }
  const Shape x = g.input_shape(0), statistics = g.shape(g.saved_output(1));
  const int64_t length = num_elements(x) / num_elements(statistics);
  const double n = static_cast<double>(length);
  Shape rows = {statistics[0], statistics[1], length}, column = {statistics[0], statistics[1], 1};
  if (g.attributes().get_string("layout", "nchw") == "nhwc") {
    const int64_t channels = x.back() / statistics[1];
    rows = {statistics[0], length / channels, statistics[1], channels};
    column = {statistics[0], 1, statistics[1], 1};
  }
  ValueId dx = kNoValue;
  if (g.output_grad(1) != kNoValue) {
    dx = g.expand(g.reshape(g.mul(g.output_grad(1), 1 / n), column), rows);
  }
  if (g.output_grad(2) != kNoValue) {
    const ValueId inv = g.saved_output(2);
    const ValueId factor = g.mul(g.mul(g.output_grad(2), g.mul(inv, g.mul(inv, inv))), -1 / n);
    const ValueId values = g.cast(g.input(0), g.dtype(inv));
    const ValueId centered = g.sub(g.reshape(values, rows), g.reshape(g.saved_output(1), column));
    const ValueId term = g.mul(centered, g.reshape(factor, column));
    dx = dx == kNoValue ? term : g.add(dx, term);
  }
  return g.cast(g.reshape(dx, x), g.dtype(g.input(0)));
}

void gradient(GradientBuilder& g) {
  std::vector<ValueId> grads(3, kNoValue);
  if (g.output_grad(0) != kNoValue) {
    grads = g.node("GroupNormGrad",
                   {g.output_grad(0), g.input(0), g.input(1), g.saved_output(1), g.saved_output(2)},
                   g.attributes());
  }
  const ValueId extra = g.needs_grad(0) ? through_statistics(g) : kNoValue;
  if (extra != kNoValue) {
    grads[0] = grads[0] == kNoValue ? extra : g.add(grads[0], extra);
  }
  for (int i = 0; i < 3; ++i) {
    if (g.needs_grad(i) && grads[static_cast<size_t>(i)] != kNoValue) {
      g.set_input_grad(i, grads[static_cast<size_t>(i)]);
    }
  }
}

Shape shape_with_channels(UpgradeContext& u) {
  const Shape& x = u.shape(u.input(0));
  TRAINRT_REQUIRE(x.size() >= 2, kInvalidModel, "x is ", shape_string(x), "; wanted [n, c, ...]");
  return x;
}

// Opset 18 scales per group, opset 21 per channel.
void upgrade_group(UpgradeContext& u) {
  const Shape x = shape_with_channels(u);
  const int64_t groups = u.attributes().get_int("num_groups");
  const auto per_channel = [&](ValueId parameter) {
    const int64_t size = num_elements(u.shape(parameter));
    if (u.opset() >= 21 || groups <= 0 || size != groups || size == x[1]) {
      return parameter;
    }
    const Shape repeated = {groups, x[1] / groups};
    return u.reshape(u.expand(u.reshape(parameter, {groups, 1}), repeated), {x[1]});
  };
  u.set_output(
      0,
      u.emit("GroupNorm",
             {u.input(0), per_channel(u.input(1)), per_channel(u.input(2))},
             {{"num_groups", groups}, {"epsilon", u.attributes().get_float("epsilon", 1e-5)}})
          .at(0));
}

void upgrade_instance(UpgradeContext& u) {
  u.set_output(0,
               u.emit("GroupNorm",
                      {u.input(0), u.input(1), u.input(2)},
                      {{"num_groups", shape_with_channels(u)[1]},
                       {"epsilon", u.attributes().get_float("epsilon", 1e-5)}})
                   .at(0));
}

TensorType example_image(bool last) {
  return {DType::kFloat32, last ? Shape{2, 3, 5, 8} : Shape{2, 8, 3, 5}};
}

OpDef forward_op() {
  OpDef op;
  op.name = "GroupNorm";
  op.infer_types = infer_forward;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 8); };
  op.sharding = sharding;
  op.localize = localize;
  op.reference_kernel = run_reference;
  op.cpu_kernel = run_fast;
  op.workspace = workspace;
  op.gradient = gradient;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  for (const auto& [name, groups] : {std::pair{"groups", 2}, std::pair{"instances", 8}}) {
    for (const bool last : {false, true}) {
      op.examples.push_back(
          {.name = concat(name, last ? "_nhwc" : ""),
           .attributes = {{"num_groups", int64_t{groups}},
                          {"epsilon", 1e-5},
                          {"layout", std::string(last ? "nhwc" : "nchw")}},
           .inputs = {example_image(last), {DType::kFloat32, {8}}, {DType::kFloat32, {8}}},
           .values = {}});
    }
  }
  return op;
}

OpDef grad_op() {
  OpDef op;
  op.name = "GroupNormGrad";
  op.infer_types = infer_backward;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 12); };
  op.sharding = sharding;
  op.localize = localize;
  op.reference_kernel = run_reference;
  op.cpu_kernel = run_fast;
  op.workspace = workspace;
  op.inplace = {{0, 0}};
  for (const bool last : {false, true}) {
    op.examples.push_back({.name = last ? "groups_nhwc" : "groups",
                           .attributes = {{"num_groups", int64_t{2}},
                                          {"layout", std::string(last ? "nhwc" : "nchw")}},
                           .inputs = {example_image(last),
                                      example_image(last),
                                      {DType::kFloat32, {8}},
                                      {DType::kFloat32, {2, 2}},
                                      {DType::kFloat32, {2, 2}}},
                           .values = {}});
  }
  return op;
}

const RegisterOp kGroupNorm{forward_op()};
const RegisterOp kGroupNormGrad{grad_op()};
const RegisterImageRule kImages{"GroupNorm", {.form = ImageForm::kLayout, .images = {0}}};
const RegisterUpgrade kGroup{"GroupNormalization", upgrade_group};
const RegisterUpgrade kInstance{"InstanceNormalization", upgrade_instance};

}  // namespace

}  // namespace trainrt
