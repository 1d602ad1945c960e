// GroupNormalization (Wu & He, 2018) over x [n, c, spatial...]: each of `num_groups` groups of
// channels of a sample is normalized, then scaled per channel. InstanceNormalization is the case of
// one channel per group.
//
//   GroupNorm(x, scale, bias)                  -> y, mean, inv_std     mean, inv_std: [n, groups],
//   GroupNormGrad(dy, x, scale, mean, inv_std) -> dx, dscale, dbias    float32 for 16-bit x
//
// With h = (x - mean) inv_std: per (sample, channel) the sums of dy and dy h go to the workspace;
// from them follow the sums of a group (weighted by scale) and, over samples in order, dscale,
// dbias.
#include <cmath>

#include "graph/autodiff.h"
#include "graph/upgrade.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

struct GroupView {
  int64_t n = 1, groups = 1, channels = 1, s = 1;  // channels per group, positions per channel
  int64_t c() const { return groups * channels; }
  int64_t length() const { return channels * s; }
};

template <typename Context>
GroupView view_of(const Context& op) {
  const Shape& x = op.input_shape(op.node().op_type == "GroupNormGrad" ? 1 : 0);
  TRAINRT_REQUIRE(
      x.size() >= 2, kInvalidModel, "GroupNorm wants [n, c, ...], got ", shape_string(x));
  const int64_t groups = op.attributes().get_int("num_groups");
  TRAINRT_REQUIRE(groups > 0 && x[1] % groups == 0,
                  kInvalidModel,
                  "GroupNorm: ",
                  x[1],
                  " channels do not divide into ",
                  groups,
                  " groups");
  return {x[0], groups, x[1] / groups, dims_product(x, 2, static_cast<int>(x.size()))};
}

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

int64_t sums_bytes(const GroupView& v) {
  return 2 * v.n * v.c() * static_cast<int64_t>(sizeof(double));
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
  std::string x = "n (g c)";
  for (int d = 2; d < ndim; ++d) {
    x += concat(" s", d);
  }
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
  const Shape rows = {statistics[0], statistics[1], num_elements(x) / num_elements(statistics)};
  const Shape column = {statistics[0], statistics[1], 1};
  const double n = static_cast<double>(rows[2]);
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

OpDef forward_op() {
  OpDef op;
  op.name = "GroupNorm";
  op.infer_types = infer_forward;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 8); };
  op.sharding = sharding;
  op.localize = localize;
  op.reference_kernel = [](KernelContext& context) {
    dispatch_real(context.input_dtype(0),
                  [&](auto tag) { forward<double, decltype(tag)>(context); });
  };
  op.cpu_kernel = [](KernelContext& context) {
    dispatch_real(context.input_dtype(0),
                  [&](auto tag) { forward<Compute<decltype(tag)>, decltype(tag)>(context); });
  };
  op.gradient = gradient;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  for (const auto& [name, groups] : {std::pair{"groups", 2}, std::pair{"instances", 8}}) {
    op.examples.push_back({.name = name,
                           .attributes = {{"num_groups", int64_t{groups}}, {"epsilon", 1e-5}},
                           .inputs = {{DType::kFloat32, {2, 8, 3, 5}},
                                      {DType::kFloat32, {8}},
                                      {DType::kFloat32, {8}}},
                           .values = {}});
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
  op.reference_kernel = [](KernelContext& context) {
    std::vector<double> sums(static_cast<size_t>(sums_bytes(view_of(context)) / 8));
    dispatch_real(context.input_dtype(0),
                  [&](auto tag) { backward<double, decltype(tag)>(context, sums.data()); });
  };
  op.cpu_kernel = [](KernelContext& context) {
    dispatch_real(context.input_dtype(0), [&](auto tag) {
      backward<Compute<decltype(tag)>, decltype(tag)>(
          context, reinterpret_cast<double*>(context.workspace().data()));
    });
  };
  op.workspace = [](const OpContext& context, const DeviceSpec& spec) {
    return spec.backend == Backend::kCpu ? sums_bytes(view_of(context)) : 0;
  };
  op.inplace = {{0, 0}};
  op.examples = {{.name = "groups",
                  .attributes = {{"num_groups", int64_t{2}}},
                  .inputs = {{DType::kFloat32, {2, 8, 3, 5}},
                             {DType::kFloat32, {2, 8, 3, 5}},
                             {DType::kFloat32, {8}},
                             {DType::kFloat32, {2, 2}},
                             {DType::kFloat32, {2, 2}}},
                  .values = {}}};
  return op;
}

const RegisterOp kGroupNorm{forward_op()};
const RegisterOp kGroupNormGrad{grad_op()};
const RegisterUpgrade kGroup{"GroupNormalization", upgrade_group};
const RegisterUpgrade kInstance{"InstanceNormalization", upgrade_instance};

}  // namespace

}  // namespace trainrt
