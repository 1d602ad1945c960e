// BatchNormalization in pieces, cut where ranks that normalize together must exchange sums:
//
//   BatchNormMoments(x)                                    -> [2, c] float64: sum x, sum x^2
//   BatchNormApply(x, moments, scale, bias)                -> y = (x - mean) inv_std scale + bias
//   BatchNormStatistics(moments)                           -> mean, var (population)
//   BatchNormGradSums(dy, x, moments)                      -> [2, c] float64: sum dy, sum dy h
//   BatchNormInputGrad(dy, x, scale, moments, sums)        -> dx
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
// ONNX's running variance takes the population variance of the batch, as its text says; PyTorch
// stores the unbiased one. Opset 7 to 13 tell training by the number of outputs, later ones by
// training_mode; momentum is the weight of the old value.
#include <cmath>

#include "graph/autodiff.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"
#include "ops/onnx_dtype.h"
#include "ops/rows.h"
#include "ops/spatial.h"

namespace trainrt {

namespace {

constexpr int64_t kMaxBlocks = 64;  // of rows, where channels are the columns

// An image as [planes of one channel] or as [rows][channels]; the latter also for [n, c].
struct ChannelView {
  int64_t n = 1, c = 1, s = 1;
  bool columns = false;  // channels are contiguous
  int64_t rows() const { return n * s; }
  int64_t block() const { return std::max<int64_t>(16, (rows() + kMaxBlocks - 1) / kMaxBlocks); }
  int64_t num_blocks() const { return (rows() + block() - 1) / block(); }
};

template <typename Context>
ChannelView view_of(const Context& op) {
  const bool last = op.attributes().get_string("layout", "nchw") == "nhwc";
  const ImageShape image = image_shape(op.input_shape(0), last);
  const int64_t s = num_elements(image.spatial);
  return {image.n, image.c, s, last || s == 1};
}

struct Channel {
  double mean = 0, inv = 0;
};

template <typename Context>
Channel channel_of(const Context& op, const double* moments, int64_t c, int64_t num_channels) {
  const double count = static_cast<double>(op.attributes().get_int("count"));
  const double mean = moments[c] / count;
  const double variance = std::max(0.0, moments[num_channels + c] / count - mean * mean);
  return {mean, 1 / std::sqrt(variance + op.attributes().get_float("epsilon", 1e-5))};
}

// ---- two sums per channel --------------------------------------------------------------------

// term(i, c) -> pair of doubles for the element at offset i. Sums go to out[0..c) and out[c..2c).
// Channels contiguous: rows in blocks, sums of blocks in the workspace, added in order.
template <typename Term>
void channel_sums(KernelContext& op, const ChannelView& v, double* blocks, const Term& term) {
  double* out = op.output<double>(0);
  if (!v.columns) {
    op.parallel_for(v.c, row_grain(v.n * v.s), [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        double first = 0, second = 0;
        for (int64_t n = 0; n < v.n; ++n) {
          const int64_t offset = (n * v.c + c) * v.s;
#pragma omp simd reduction(+ : first, second)
          for (int64_t i = 0; i < v.s; ++i) {
            double a, b;
            term(offset + i, c, a, b);
            first += a;
            second += b;
          }
        }
        out[c] = first;
        out[v.c + c] = second;
      }
    });
    return;
  }
  op.parallel_for(v.num_blocks(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      double* first = blocks + 2 * k * v.c;
      double* second = first + v.c;
      std::fill(first, first + 2 * v.c, 0.0);
      const int64_t last_row = std::min(v.rows(), (k + 1) * v.block());
      for (int64_t r = k * v.block(); r < last_row; ++r) {
#pragma omp simd
        for (int64_t c = 0; c < v.c; ++c) {
          double a, b;
          term(r * v.c + c, c, a, b);
          first[c] += a;
          second[c] += b;
        }
      }
    }
  });
  for (int64_t i = 0; i < 2 * v.c; ++i) {
    double sum = 0;
    for (int64_t k = 0; k < v.num_blocks(); ++k) {
      sum += blocks[2 * k * v.c + i];
    }
    out[i] = sum;
  }
}

// ---- element by element ----------------------------------------------------------------------

// value(i, c) stored at i, for all elements; c is the element's channel.
template <typename T, typename Value>
void map_channels(KernelContext& op, const ChannelView& v, T* out, const Value& value) {
  if (!v.columns) {
    op.parallel_for(v.n * v.c, row_grain(v.s), [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t c = p % v.c, offset = p * v.s;
#pragma omp simd
        for (int64_t i = 0; i < v.s; ++i) {
          out[offset + i] = value(offset + i, c);
        }
      }
    });
    return;
  }
  op.parallel_for(v.rows(), row_grain(v.c), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
#pragma omp simd
      for (int64_t c = 0; c < v.c; ++c) {
        out[r * v.c + c] = value(r * v.c + c, c);
      }
    }
  });
}

// Workspace of a kernel: first three arrays of one double per channel, then sums of blocks.
int64_t workspace(const OpContext& op, const DeviceSpec& spec) {
  if (spec.backend != Backend::kCpu) {
    return 0;
  }
  const ChannelView v = view_of(op);
  const int64_t blocks = v.columns ? 2 * v.num_blocks() * v.c : 0;
  return (3 * v.c + blocks) * static_cast<int64_t>(sizeof(double));
}

// Coefficient arrays in the workspace, as C.
template <typename C>
C* coefficients(KernelContext& op, const ChannelView& v, int which) {
  return reinterpret_cast<C*>(reinterpret_cast<double*>(op.workspace().data()) + which * v.c);
}

double* block_sums(KernelContext& op, const ChannelView& v) {
  return reinterpret_cast<double*>(op.workspace().data()) + 3 * v.c;
}

template <typename C>
void fill_channels(KernelContext& op, const ChannelView& v, const double* moments) {
  C* mean = coefficients<C>(op, v, 0);
  C* inv = coefficients<C>(op, v, 1);
  for (int64_t c = 0; c < v.c; ++c) {
    const Channel channel = channel_of(op, moments, c, v.c);
    mean[c] = static_cast<C>(channel.mean);
    inv[c] = static_cast<C>(channel.inv);
  }
}

template <typename T>
void moments_fast(KernelContext& op) {
  const ChannelView v = view_of(op);
  const T* x = op.input<T>(0);
  channel_sums(op, v, block_sums(op, v), [x](int64_t i, int64_t, double& a, double& b) {
    a = load<double>(x[i]);
    b = a * a;
  });
}

template <typename T>
void apply_fast(KernelContext& op) {
  using C = Compute<T>;
  const ChannelView v = view_of(op);
  const T* x = op.input<T>(0);
  fill_channels<C>(op, v, op.input<double>(1));
  const C* mean = coefficients<C>(op, v, 0);
  C* factor = coefficients<C>(op, v, 1);
  C* shift = coefficients<C>(op, v, 2);
  for (int64_t c = 0; c < v.c; ++c) {
    factor[c] *= load<C>(op.input<T>(2)[c]);
    shift[c] = load<C>(op.input<T>(3)[c]);
  }
  map_channels(op, v, op.output<T>(0), [x, mean, factor, shift](int64_t i, int64_t c) {
    return store<T>((load<C>(x[i]) - mean[c]) * factor[c] + shift[c]);
  });
}

template <typename T>
void grad_sums_fast(KernelContext& op) {
  const ChannelView v = view_of(op);
  const T* dy = op.input<T>(0);
  const T* x = op.input<T>(1);
  fill_channels<double>(op, v, op.input<double>(2));
  const double* mean = coefficients<double>(op, v, 0);
  const double* inv = coefficients<double>(op, v, 1);
  channel_sums(
      op, v, block_sums(op, v), [dy, x, mean, inv](int64_t i, int64_t c, double& a, double& b) {
        a = load<double>(dy[i]);
        b = a * ((load<double>(x[i]) - mean[c]) * inv[c]);
      });
}

// dx = k (dy - (x b + a)) with, per channel, k = scale inv_std, b = inv_std mean(dy h) and
// a = mean dy - mean x b; a = b = 0 when the moments are fixed.
template <typename T>
void input_grad_fast(KernelContext& op) {
  using C = Compute<T>;
  const ChannelView v = view_of(op);
  const T* dy = op.input<T>(0);
  const T* x = op.input<T>(1);
  const T* scale = op.input<T>(2);
  const double* sums = op.input<double>(4);
  const double count = static_cast<double>(op.attributes().get_int("count"));
  const bool fixed = op.attributes().get_int("fixed", 0) != 0;
  C* factor = coefficients<C>(op, v, 0);
  C* slope = coefficients<C>(op, v, 1);
  C* shift = coefficients<C>(op, v, 2);
  for (int64_t c = 0; c < v.c; ++c) {
    const Channel channel = channel_of(op, op.input<double>(3), c, v.c);
    const double b = fixed ? 0 : channel.inv * sums[v.c + c] / count;
    const double a = fixed ? 0 : sums[c] / count - channel.mean * b;
    factor[c] = static_cast<C>(load<double>(scale[c]) * channel.inv);
    slope[c] = static_cast<C>(b);
    shift[c] = static_cast<C>(a);
  }
  map_channels(op, v, op.output<T>(0), [dy, x, factor, slope, shift](int64_t i, int64_t c) {
    return store<T>(factor[c] * (load<C>(dy[i]) - (load<C>(x[i]) * slope[c] + shift[c])));
  });
}

// ---- reference: the definitions, element by element ------------------------------------------

template <typename Fn>
void for_each_element(const ChannelView& v, Fn&& fn) {
  const int64_t total = v.n * v.c * v.s;
  for (int64_t i = 0; i < total; ++i) {
    fn(i, v.columns ? i % v.c : i / v.s % v.c);
  }
}

template <typename T>
void moments_reference(KernelContext& op) {
  const ChannelView v = view_of(op);
  double* out = op.output<double>(0);
  std::fill(out, out + 2 * v.c, 0.0);
  for_each_element(v, [&](int64_t i, int64_t c) {
    const double x = load<double>(op.input<T>(0)[i]);
    out[c] += x;
    out[v.c + c] += x * x;
  });
}

template <typename T>
void apply_reference(KernelContext& op) {
  const ChannelView v = view_of(op);
  for_each_element(v, [&](int64_t i, int64_t c) {
    const Channel channel = channel_of(op, op.input<double>(1), c, v.c);
    const double h = (load<double>(op.input<T>(0)[i]) - channel.mean) * channel.inv;
    op.output<T>(0)[i] =
        store<T>(h * load<double>(op.input<T>(2)[c]) + load<double>(op.input<T>(3)[c]));
  });
}

template <typename T>
void grad_sums_reference(KernelContext& op) {
  const ChannelView v = view_of(op);
  double* out = op.output<double>(0);
  std::fill(out, out + 2 * v.c, 0.0);
  for_each_element(v, [&](int64_t i, int64_t c) {
    const Channel channel = channel_of(op, op.input<double>(2), c, v.c);
    const double dy = load<double>(op.input<T>(0)[i]);
    out[c] += dy;
    out[v.c + c] += dy * (load<double>(op.input<T>(1)[i]) - channel.mean) * channel.inv;
  });
}

template <typename T>
void input_grad_reference(KernelContext& op) {
  const ChannelView v = view_of(op);
  const double count = static_cast<double>(op.attributes().get_int("count"));
  const bool fixed = op.attributes().get_int("fixed", 0) != 0;
  const double* sums = op.input<double>(4);
  for_each_element(v, [&](int64_t i, int64_t c) {
    const Channel channel = channel_of(op, op.input<double>(3), c, v.c);
    const double h = (load<double>(op.input<T>(1)[i]) - channel.mean) * channel.inv;
    const double through_moments = fixed ? 0 : (sums[c] + h * sums[v.c + c]) / count;
    op.output<T>(0)[i] = store<T>(load<double>(op.input<T>(2)[c]) * channel.inv *
                                  (load<double>(op.input<T>(0)[i]) - through_moments));
  });
}

// ---- kernels over channels alone -------------------------------------------------------------

void statistics_kernel(KernelContext& op) {
  const int64_t num_channels = op.input_shape(0)[1];
  const double count = static_cast<double>(op.attributes().get_int("count"));
  const double* moments = op.input<double>(0);
  dispatch_real(op.output_dtype(op.has_output(0) ? 0 : 1), [&](auto tag) {
    using T = decltype(tag);
    for (int64_t c = 0; c < num_channels; ++c) {
      const double mean = moments[c] / count;
      if (op.has_output(0)) {
        op.output<T>(0)[c] = store<T>(mean);
      }
      if (op.has_output(1)) {
        op.output<T>(1)[c] =
            store<T>(std::max(0.0, moments[num_channels + c] / count - mean * mean));
      }
    }
  });
}

void fixed_moments_kernel(KernelContext& op) {
  const int64_t num_channels = op.input_shape(0)[0];
  double* moments = op.output<double>(0);
  dispatch_real(op.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    for (int64_t c = 0; c < num_channels; ++c) {
      const double mean = load<double>(op.input<T>(0)[c]);
      moments[c] = mean;
      moments[num_channels + c] = load<double>(op.input<T>(1)[c]) + mean * mean;
    }
  });
}

void parameter_grad_kernel(KernelContext& op) {
  const int64_t num_channels = op.input_shape(0)[1];
  const double* sums = op.input<double>(0);
  dispatch_real(op.output_dtype(op.has_output(0) ? 0 : 1), [&](auto tag) {
    using T = decltype(tag);
    for (int64_t c = 0; c < num_channels; ++c) {
      if (op.has_output(0)) {
        op.output<T>(0)[c] = store<T>(sums[num_channels + c]);
      }
      if (op.has_output(1)) {
        op.output<T>(1)[c] = store<T>(sums[c]);
      }
    }
  });
}

// With k = scale inv_std: dmean = -k sum dy and dvar = -k inv_std sum(dy h) / 2; var depends on the
// mean as well, var = m1 / count - (m0 / count)^2.
void moments_grad_kernel(KernelContext& op) {
  const int64_t num_channels = op.input_shape(0)[1];
  const double count = static_cast<double>(op.attributes().get_int("count"));
  const double* sums = op.input<double>(0);
  double* out = op.output<double>(0);
  dispatch_real(op.input_dtype(2), [&](auto tag) {
    for (int64_t c = 0; c < num_channels; ++c) {
      const Channel channel = channel_of(op, op.input<double>(1), c, num_channels);
      const double k = load<double>(op.input<decltype(tag)>(2)[c]) * channel.inv;
      const double dvar = -0.5 * k * channel.inv * sums[num_channels + c];
      out[c] = (-k * sums[c] - 2 * channel.mean * dvar) / count;
      out[num_channels + c] = dvar / count;
    }
  });
}

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

template <typename Fn>
Kernel by_dtype(Fn fn) {
  return
      [fn](KernelContext& op) { dispatch_real(op.input_dtype(0), [&](auto tag) { fn(tag, op); }); };
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

// Examples of a kernel over images: `before` images, then the rest; both layouts.
std::vector<OpExample> image_examples(int images, const std::vector<char>& rest) {
  std::vector<OpExample> list;
  for (const bool last : {false, true}) {
    OpExample example;
    example.name = last ? "nhwc" : "nchw";
    example.attributes = {{"count", int64_t{60}}, {"epsilon", 1e-5}, {"layout", example.name}};
    example.inputs.assign(static_cast<size_t>(images), last ? kImageLast : kImage);
    example.values.resize(static_cast<size_t>(images));
    for (const char kind : rest) {  // m: moments, c: one per channel
      example.inputs.push_back(kind == 'm' ? TensorType{DType::kFloat64, {2, 6}} : kChannels);
      example.values.push_back(kind == 'm' ? example_moments() : Tensor());
    }
    list.push_back(std::move(example));
  }
  return list;
}

OpDef moments_op() {
  OpDef op;
  op.name = "BatchNormMoments";
  op.infer_types = infer_sums;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 3); };
  op.sharding = [](const OpContext& context) { return image_sharding(context, "I -> 1 c", true); };
  op.reference_kernel =
      by_dtype([](auto tag, KernelContext& context) { moments_reference<decltype(tag)>(context); });
  op.cpu_kernel =
      by_dtype([](auto tag, KernelContext& context) { moments_fast<decltype(tag)>(context); });
  op.workspace = workspace;
  op.not_differentiable = true;  // BatchNormApply's gradient goes through the moments itself
  op.cheap = true;
  op.examples = image_examples(1, {});
  return op;
}

void apply_gradient(GradientBuilder& g) {
  const Attributes attributes = g.attributes();
  const ValueId x = g.input(0), moments = g.input(1), scale = g.input(2), dy = g.output_grad(0);
  const ValueId sums = g.op("BatchNormGradSums", {dy, x, moments}, attributes);
  if (g.needs_grad(0)) {
    g.set_input_grad(0, g.op("BatchNormInputGrad", {dy, x, scale, moments, sums}, attributes));
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
    return image_sharding(context, "I, 1 c, c, c -> I", false);
  };
  op.reference_kernel =
      by_dtype([](auto tag, KernelContext& context) { apply_reference<decltype(tag)>(context); });
  op.cpu_kernel =
      by_dtype([](auto tag, KernelContext& context) { apply_fast<decltype(tag)>(context); });
  op.workspace = workspace;
  op.gradient = apply_gradient;
  op.cheap = true;
  op.examples = image_examples(1, {'m', 'c', 'c'});
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
    ShardingRule rule = image_sharding(context, "I, I, 1 c -> 1 c", true);
    rule.linear = {{0}};
    return rule;
  };
  op.reference_kernel = by_dtype(
      [](auto tag, KernelContext& context) { grad_sums_reference<decltype(tag)>(context); });
  op.cpu_kernel =
      by_dtype([](auto tag, KernelContext& context) { grad_sums_fast<decltype(tag)>(context); });
  op.workspace = workspace;
  op.examples = image_examples(2, {'m'});
  return op;
}

OpDef input_grad_op() {
  OpDef op;
  op.name = "BatchNormInputGrad";
  op.infer_types = [](const OpContext& context) -> TensorTypes { return {context.input_type(0)}; };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 6); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    ShardingRule rule = image_sharding(context, "I, I, c, 1 c, 1 c -> I", false);
    rule.linear = {{0, 4}};
    return rule;
  };
  op.reference_kernel = by_dtype(
      [](auto tag, KernelContext& context) { input_grad_reference<decltype(tag)>(context); });
  op.cpu_kernel =
      by_dtype([](auto tag, KernelContext& context) { input_grad_fast<decltype(tag)>(context); });
  op.inplace = {{0, 0}};
  op.workspace = workspace;
  op.examples = image_examples(2, {'c', 'm', 'm'});
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
  OpDef op = channels_op("BatchNormStatistics", statistics_kernel);
  op.not_differentiable = true;  // they are remembered, not learned
  return op;
}

OpDef parameter_grad_op() {
  OpDef op = channels_op("BatchNormParameterGrad", parameter_grad_kernel);
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
  op.reference_kernel = moments_grad_kernel;
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
  op.reference_kernel = fixed_moments_kernel;
  op.gradient = fixed_moments_gradient;
  op.cheap = true;
  op.examples = {{.name = "channels",
                  .attributes = {},
                  .inputs = {kChannels, kChannels},
                  .values = {},
                  .low = 0.5}};
  return op;
}

struct RunningAverage {
  explicit RunningAverage(const Attributes& attributes)
      : momentum(attributes.get_float("momentum")) {}
  template <typename T>
  T operator()(T running, T batch) const {
    return running * T(momentum) + batch * (T(1) - T(momentum));
  }
  double momentum;
};

OpDef running_average_op() {
  OpDef op = binary_op<RunningAverage>("RunningAverage");
  op.upgrade = nullptr;
  op.not_differentiable = true;
  op.inplace = {{0, 0}};
  op.examples = {grad_example(-1, 1, {{"momentum", 0.9}})};
  return op;
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
    const ValueId moments = u.op("BatchNormFixedMoments", {u.input(3), u.input(4)});
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
                                 {u.input(3 + i), batch[static_cast<size_t>(i)]},
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

const RegisterOp kMoments{moments_op()};
const RegisterOp kApply{apply_op()};
const RegisterOp kGradSums{grad_sums_op()};
const RegisterOp kInputGrad{input_grad_op()};
const RegisterOp kStatistics{statistics_op()};
const RegisterOp kParameterGrad{parameter_grad_op()};
const RegisterOp kFixedMoments{fixed_moments_op()};
const RegisterOp kMomentsGrad{moments_grad_op()};
const RegisterOp kRunningAverage{running_average_op()};
const RegisterUpgrade kBatchNorm{"BatchNormalization", upgrade};

}  // namespace

}  // namespace trainrt
