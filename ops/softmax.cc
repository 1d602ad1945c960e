// Softmax along `axis`: y = exp(x - max x) / sum exp(x - max x). LogSoftmax: y = x - max x - log of
// that sum. Each with its gradient as one pass over memory:
//
//   SoftmaxGrad(y, dy)     dx = y (dy - sum(y dy))
//   LogSoftmaxGrad(y, dy)  dx = dy - exp(y) sum(dy)
//
// Before opset 13 ONNX normalizes over all dims from `axis` on, flattened: the upgrade reshapes.
//
// The fast kernels take the axis as rows when it is the last one, else as columns in panels of
// kWidth, which vectorise the same way.
#include "graph/autodiff.h"
#include "graph/upgrade.h"
#include "ops/rows.h"
#include "ops/vector_math.h"

namespace trainrt {

namespace {

constexpr int64_t kWidth = 32;  // columns of a panel

AxisView view_of(const KernelContext& op) {
  const Shape& shape = op.input_shape(0);
  return axis_view(
      shape, normalize_axis(op.attributes().get_int("axis", -1), static_cast<int>(shape.size())));
}

// ---- reference -------------------------------------------------------------------------------

// Calls fn(offset of the first element, stride, length) for every slice along the axis.
template <typename Fn>
void for_each_slice(const AxisView& view, Fn&& fn) {
  for (int64_t o = 0; o < view.outer; ++o) {
    for (int64_t i = 0; i < view.inner; ++i) {
      fn(o * view.length * view.inner + i);
    }
  }
}

template <typename T>
void forward_reference(KernelContext& op, bool logarithm) {
  const AxisView view = view_of(op);
  const T* x = op.input<T>(0);
  T* y = op.output<T>(0);
  for_each_slice(view, [&](int64_t offset) {
    double max = -std::numeric_limits<double>::infinity(), sum = 0;
    for (int64_t k = 0; k < view.length; ++k) {
      max = std::max(max, load<double>(x[offset + k * view.inner]));
    }
    for (int64_t k = 0; k < view.length; ++k) {
      sum += std::exp(load<double>(x[offset + k * view.inner]) - max);
    }
    for (int64_t k = 0; k < view.length; ++k) {
      const double shifted = load<double>(x[offset + k * view.inner]) - max;
      y[offset + k * view.inner] =
          store<T>(logarithm ? shifted - std::log(sum) : std::exp(shifted) / sum);
    }
  });
}

template <typename T>
void backward_reference(KernelContext& op, bool logarithm) {
  const AxisView view = view_of(op);
  const T* y = op.input<T>(0);
  const T* dy = op.input<T>(1);
  T* dx = op.output<T>(0);
  for_each_slice(view, [&](int64_t offset) {
    double sum = 0;
    for (int64_t k = 0; k < view.length; ++k) {
      const int64_t i = offset + k * view.inner;
      sum += load<double>(dy[i]) * (logarithm ? 1.0 : load<double>(y[i]));
    }
    for (int64_t k = 0; k < view.length; ++k) {
      const int64_t i = offset + k * view.inner;
      const double g = load<double>(dy[i]), p = load<double>(y[i]);
      dx[i] = store<T>(logarithm ? g - std::exp(p) * sum : p * (g - sum));
    }
  });
}

// ---- fast: rows ------------------------------------------------------------------------------

template <typename T, bool kLog>
void forward_row(const T* x, T* y, int64_t n) {
  using C = Compute<T>;
  C max = -std::numeric_limits<C>::infinity();
#pragma omp simd reduction(max : max)
  for (int64_t k = 0; k < n; ++k) {
    const C value = load<C>(x[k]);
    max = value > max ? value : max;
  }
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < n; ++k) {
    const C e = vmath::exp(load<C>(x[k]) - max);
    if constexpr (!kLog && !is_half<T>) {
      y[k] = e;
    }
    sum += static_cast<double>(e);
  }
  const C inverse = static_cast<C>(1.0 / sum), log_sum = static_cast<C>(std::log(sum));
#pragma omp simd
  for (int64_t k = 0; k < n; ++k) {
    if constexpr (kLog) {
      y[k] = store<T>(load<C>(x[k]) - max - log_sum);
    } else if constexpr (is_half<T>) {
      y[k] = store<T>(vmath::exp(load<C>(x[k]) - max) * inverse);
    } else {
      y[k] *= inverse;
    }
  }
}

template <typename T, bool kLog>
void backward_row(const T* y, const T* dy, T* dx, int64_t n) {
  using C = Compute<T>;
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < n; ++k) {
    const double g = load<double>(dy[k]);
    sum += kLog ? g : g * load<double>(y[k]);
  }
  const C total = static_cast<C>(sum);
#pragma omp simd
  for (int64_t k = 0; k < n; ++k) {
    const C g = load<C>(dy[k]), p = load<C>(y[k]);
    dx[k] = store<T>(kLog ? g - vmath::exp(p) * total : p * (g - total));
  }
}

// ---- fast: panels of columns -----------------------------------------------------------------

template <typename T, bool kLog>
void forward_panel(const T* x, T* y, int64_t length, int64_t stride, int64_t width) {
  using C = Compute<T>;
  C max[kWidth];
  double sum[kWidth] = {};
  std::fill(max, max + kWidth, -std::numeric_limits<C>::infinity());
  for (int64_t k = 0; k < length; ++k) {
    for (int64_t j = 0; j < width; ++j) {
      const C value = load<C>(x[k * stride + j]);
      max[j] = value > max[j] ? value : max[j];
    }
  }
  for (int64_t k = 0; k < length; ++k) {
    for (int64_t j = 0; j < width; ++j) {
      sum[j] += static_cast<double>(vmath::exp(load<C>(x[k * stride + j]) - max[j]));
    }
  }
  C last[kWidth];
  for (int64_t j = 0; j < width; ++j) {
    last[j] = static_cast<C>(kLog ? std::log(sum[j]) : 1.0 / sum[j]);
  }
  for (int64_t k = 0; k < length; ++k) {
    for (int64_t j = 0; j < width; ++j) {
      const C shifted = load<C>(x[k * stride + j]) - max[j];
      y[k * stride + j] = store<T>(kLog ? shifted - last[j] : vmath::exp(shifted) * last[j]);
    }
  }
}

template <typename T, bool kLog>
void backward_panel(const T* y, const T* dy, T* dx, int64_t length, int64_t stride, int64_t width) {
  using C = Compute<T>;
  double sum[kWidth] = {};
  for (int64_t k = 0; k < length; ++k) {
    for (int64_t j = 0; j < width; ++j) {
      const double g = load<double>(dy[k * stride + j]);
      sum[j] += kLog ? g : g * load<double>(y[k * stride + j]);
    }
  }
  for (int64_t k = 0; k < length; ++k) {
    for (int64_t j = 0; j < width; ++j) {
      const C g = load<C>(dy[k * stride + j]), p = load<C>(y[k * stride + j]);
      const C total = static_cast<C>(sum[j]);
      dx[k * stride + j] = store<T>(kLog ? g - vmath::exp(p) * total : p * (g - total));
    }
  }
}

// Calls row(offset) for each row, or panel(offset, width) for each panel of columns.
template <typename Row, typename Panel>
void run_slices(KernelContext& op, const AxisView& view, Row&& row, Panel&& panel) {
  if (view.inner == 1) {
    op.parallel_for(view.outer, row_grain(view.length), [&](int64_t begin, int64_t end) {
      for (int64_t o = begin; o < end; ++o) {
        row(o * view.length);
      }
    });
    return;
  }
  const int64_t panels = (view.inner + kWidth - 1) / kWidth;
  op.parallel_for(view.outer * panels,
                  row_grain(view.length * std::min(kWidth, view.inner)),
                  [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; ++i) {
                      const int64_t column = i % panels * kWidth;
                      panel(i / panels * view.length * view.inner + column,
                            std::min(kWidth, view.inner - column));
                    }
                  });
}

template <typename T, bool kLog>
void forward_fast(KernelContext& op) {
  const AxisView view = view_of(op);
  const T* x = op.input<T>(0);
  T* y = op.output<T>(0);
  run_slices(
      op,
      view,
      [&](int64_t offset) { forward_row<T, kLog>(x + offset, y + offset, view.length); },
      [&](int64_t offset, int64_t width) {
        forward_panel<T, kLog>(x + offset, y + offset, view.length, view.inner, width);
      });
}

template <typename T, bool kLog>
void backward_fast(KernelContext& op) {
  const AxisView view = view_of(op);
  const T* y = op.input<T>(0);
  const T* dy = op.input<T>(1);
  T* dx = op.output<T>(0);
  run_slices(
      op,
      view,
      [&](int64_t o) { backward_row<T, kLog>(y + o, dy + o, dx + o, view.length); },
      [&](int64_t o, int64_t width) {
        backward_panel<T, kLog>(y + o, dy + o, dx + o, view.length, view.inner, width);
      });
}

// ---- description -----------------------------------------------------------------------------

void upgrade(UpgradeContext& u) {
  const ValueId x = u.input(0);
  const Shape shape = u.shape(x);
  const int ndim = static_cast<int>(shape.size());
  if (u.opset() >= 13) {
    const int axis = normalize_axis(u.attributes().get_int("axis", -1), ndim);
    u.set_outputs(u.emit(u.op_type(), {x}, {{"axis", int64_t{axis}}}));
    return;
  }
  const int64_t given = u.attributes().get_int("axis", 1);
  const int axis = given == ndim ? ndim : normalize_axis(given, ndim);
  if (axis == ndim - 1) {
    u.set_outputs(u.emit(u.op_type(), {x}, {{"axis", int64_t{axis}}}));
    return;
  }
  const ValueId flat =
      u.reshape(x, {dims_product(shape, 0, axis), dims_product(shape, axis, ndim)});
  u.set_output(0, u.reshape(u.emit(u.op_type(), {flat}, {{"axis", int64_t{1}}}).at(0), shape));
}

std::vector<OpExample> examples(int num_inputs) {
  std::vector<OpExample> list;
  for (const auto& [name, axis] : {std::pair{"last_axis", -1}, std::pair{"middle_axis", 1}}) {
    list.push_back(
        {.name = name,
         .attributes = {{"axis", int64_t{axis}}},
         .inputs = TensorTypes(static_cast<size_t>(num_inputs), {DType::kFloat32, {4, 6, 40}}),
         .values = {}});
  }
  return list;
}

OpDef base(const char* name, int num_inputs) {
  OpDef op;
  op.name = name;
  op.infer_types = [](const OpContext& context) {
    context.axis();
    return infer_same(context);
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 8); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    Factors factors = Factors::elementwise(context);
    factors.whole_axis(context.axis());
    if (context.num_inputs() == 2) {
      factors.linear({{1}});
    }
    return factors;
  };
  op.inplace = {{0, num_inputs - 1}};
  op.cheap = true;
  op.examples = examples(num_inputs);
  return op;
}

template <bool kLog>
OpDef forward_op(const char* name, const char* grad_name) {
  OpDef op = base(name, 1);
  op.reference_kernel = [](KernelContext& context) {
    dispatch_real(context.input_dtype(0),
                  [&](auto tag) { forward_reference<decltype(tag)>(context, kLog); });
  };
  op.cpu_kernel = [](KernelContext& context) {
    dispatch_real(context.input_dtype(0),
                  [&](auto tag) { forward_fast<decltype(tag), kLog>(context); });
  };
  op.gradient = [grad_name](GradientBuilder& g) {
    g.set_input_grad(0, g.op(grad_name, {g.output(0), g.output_grad(0)}, g.attributes()));
  };
  op.upgrade = upgrade;
  op.precision = kLog ? PrecisionRule::kFull : PrecisionRule::kFollow;
  return op;
}

template <bool kLog>
OpDef grad_op(const char* name) {
  OpDef op = base(name, 2);
  op.reference_kernel = [](KernelContext& context) {
    dispatch_real(context.input_dtype(0),
                  [&](auto tag) { backward_reference<decltype(tag)>(context, kLog); });
  };
  op.cpu_kernel = [](KernelContext& context) {
    dispatch_real(context.input_dtype(0),
                  [&](auto tag) { backward_fast<decltype(tag), kLog>(context); });
  };
  return op;
}

const RegisterOp kSoftmax{forward_op<false>("Softmax", "SoftmaxGrad")};
const RegisterOp kSoftmaxGrad{grad_op<false>("SoftmaxGrad")};
const RegisterOp kLogSoftmax{forward_op<true>("LogSoftmax", "LogSoftmaxGrad")};
const RegisterOp kLogSoftmaxGrad{grad_op<true>("LogSoftmaxGrad")};

}  // namespace

}  // namespace trainrt
