// The element-wise passes and the sums over all but the channel. Channels are planes (nchw) or
// columns (nhwc, and [n, c]); sums over rows are taken in blocks fixed by the shape and added in
// order.
#include <algorithm>
#include <cmath>

#include "ops/batch_norm.h"
#include "ops/batch_norm_scratch.h"
#include "ops/rows.h"
#include "ops/spatial.h"

namespace trainrt::batch_norm {

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

constexpr int64_t kCoefficients = 6;

// Workspace of a kernel: first arrays of one double per channel, then sums of blocks.
int64_t workspace_bytes(const OpContext& op) {
  const ChannelView v = view_of(op);
  const int64_t blocks = v.columns ? 2 * v.num_blocks() * v.c : 0;
  return (kCoefficients * v.c + blocks) * static_cast<int64_t>(sizeof(double));
}

// Coefficient arrays in the workspace, as C.
template <typename C>
C* coefficients(KernelContext& op, const ChannelView& v, int which) {
  return reinterpret_cast<C*>(reinterpret_cast<double*>(op.workspace().data()) + which * v.c);
}

double* block_sums(KernelContext& op, const ChannelView& v) {
  return reinterpret_cast<double*>(op.workspace().data()) + kCoefficients * v.c;
}

// (x - mean) inv_std scale + bias per channel. What a ReLU behind it let pass is found again from x
// by the same arithmetic, so that the gradient does not need the output.
template <typename C>
struct Affine {
  const C* mean;
  const C* factor;
  const C* shift;
  C operator()(C x, int64_t c) const { return (x - mean[c]) * factor[c] + shift[c]; }
};

// Uses the coefficient arrays `first` to `first` + 2.
template <typename C, typename T>
Affine<C> make_affine(KernelContext& op,
                      const ChannelView& v,
                      int first,
                      const double* moments,
                      const T* scale,
                      const T* bias) {
  C* mean = coefficients<C>(op, v, first);
  C* factor = coefficients<C>(op, v, first + 1);
  C* shift = coefficients<C>(op, v, first + 2);
  for (int64_t c = 0; c < v.c; ++c) {
    const Channel channel = channel_of(op, moments, c, v.c);
    mean[c] = static_cast<C>(channel.mean);
    factor[c] = static_cast<C>(channel.inv) * load<C>(scale[c]);
    shift[c] = load<C>(bias[c]);
  }
  return {mean, factor, shift};
}

bool has_relu(const KernelContext& op) {
  return op.attributes().get_int("relu", 0) != 0;
}

// Calls fn(std::true_type or std::false_type).
template <typename Fn>
void dispatch_flag(bool flag, const Fn& fn) {
  if (flag) {
    fn(std::true_type{});
  } else {
    fn(std::false_type{});
  }
}

template <typename C>
C relu(C value) {
  return value < C(0) ? C(0) : value;  // NaN stays
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
  const T* residual = op.input<T>(4);
  const Affine<C> affine =
      make_affine<C>(op, v, 0, op.input<double>(1), op.input<T>(2), op.input<T>(3));
  dispatch_flag(has_relu(op), [&](auto relu_flag) {
    dispatch_flag(residual != nullptr, [&](auto residual_flag) {
      map_channels(op, v, op.output<T>(0), [=](int64_t i, int64_t c) {
        C h = affine(load<C>(x[i]), c);
        if constexpr (residual_flag) {
          h += load<C>(residual[i]);
        }
        return store<T>(relu_flag ? relu(h) : h);
      });
    });
  });
}

template <typename T>
void grad_sums_fast(KernelContext& op) {
  using C = Compute<T>;
  const ChannelView v = view_of(op);
  const T* dy = op.input<T>(0);
  const T* x = op.input<T>(1);
  double* mean = coefficients<double>(op, v, 0);
  double* inv = coefficients<double>(op, v, 1);
  for (int64_t c = 0; c < v.c; ++c) {
    const Channel channel = channel_of(op, op.input<double>(2), c, v.c);
    mean[c] = channel.mean;
    inv[c] = channel.inv;
  }
  if (!has_relu(op)) {
    channel_sums(op, v, block_sums(op, v), [=](int64_t i, int64_t c, double& a, double& b) {
      a = load<double>(dy[i]);
      b = a * ((load<double>(x[i]) - mean[c]) * inv[c]);
    });
    return;
  }
  const Affine<C> affine =
      make_affine<C>(op, v, 2, op.input<double>(2), op.input<T>(3), op.input<T>(4));
  channel_sums(op, v, block_sums(op, v), [=](int64_t i, int64_t c, double& a, double& b) {
    const C grad = load<C>(dy[i]);  // read in any case, or the loop would not vectorise
    a = load<double>(affine(load<C>(x[i]), c) > C(0) ? grad : C(0));
    b = a * ((load<double>(x[i]) - mean[c]) * inv[c]);
  });
}

// dx = k (dy - (x b + a)) with, per channel, k = scale inv_std, b = inv_std mean(dy h) and
// a = mean dy - mean x b; a = b = 0 when the moments are fixed. With a ReLU, dy is what passed it.
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
  if (!has_relu(op)) {
    map_channels(op, v, op.output<T>(0), [=](int64_t i, int64_t c) {
      return store<T>(factor[c] * (load<C>(dy[i]) - (load<C>(x[i]) * slope[c] + shift[c])));
    });
    return;
  }
  const Affine<C> affine = make_affine<C>(op, v, 3, op.input<double>(3), scale, op.input<T>(5));
  map_channels(op, v, op.output<T>(0), [=](int64_t i, int64_t c) {
    const C value = load<C>(x[i]);
    const C grad = load<C>(dy[i]);  // read in any case, or the loop would not vectorise
    const C passed = affine(value, c) > C(0) ? grad : C(0);
    return store<T>(factor[c] * (passed - (value * slope[c] + shift[c])));
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
void moments_plain(KernelContext& op) {
  const ChannelView v = view_of(op);
  double* out = op.output<double>(0);
  std::fill(out, out + 2 * v.c, 0.0);
  for_each_element(v, [&](int64_t i, int64_t c) {
    const double x = load<double>(op.input<T>(0)[i]);
    out[c] += x;
    out[v.c + c] += x * x;
  });
}

// What BatchNormApply makes of one element before the ReLU.
template <typename T>
double normalized(const Channel& channel, double x, const T* scale, const T* bias, int64_t c) {
  return (x - channel.mean) * channel.inv * load<double>(scale[c]) + load<double>(bias[c]);
}

template <typename T>
void apply_plain(KernelContext& op) {
  const ChannelView v = view_of(op);
  const T* residual = op.input<T>(4);
  for_each_element(v, [&](int64_t i, int64_t c) {
    const Channel channel = channel_of(op, op.input<double>(1), c, v.c);
    double h =
        normalized(channel, load<double>(op.input<T>(0)[i]), op.input<T>(2), op.input<T>(3), c);
    h += residual != nullptr ? load<double>(residual[i]) : 0;
    op.output<T>(0)[i] = store<T>(has_relu(op) ? relu(h) : h);
  });
}

template <typename T>
void grad_sums_plain(KernelContext& op) {
  const ChannelView v = view_of(op);
  double* out = op.output<double>(0);
  std::fill(out, out + 2 * v.c, 0.0);
  for_each_element(v, [&](int64_t i, int64_t c) {
    const Channel channel = channel_of(op, op.input<double>(2), c, v.c);
    const double x = load<double>(op.input<T>(1)[i]);
    double dy = load<double>(op.input<T>(0)[i]);
    if (has_relu(op) && !(normalized(channel, x, op.input<T>(3), op.input<T>(4), c) > 0)) {
      dy = 0;
    }
    out[c] += dy;
    out[v.c + c] += dy * (x - channel.mean) * channel.inv;
  });
}

template <typename T>
void input_grad_plain(KernelContext& op) {
  const ChannelView v = view_of(op);
  const double count = static_cast<double>(op.attributes().get_int("count"));
  const bool fixed = op.attributes().get_int("fixed", 0) != 0;
  const double* sums = op.input<double>(4);
  for_each_element(v, [&](int64_t i, int64_t c) {
    const Channel channel = channel_of(op, op.input<double>(3), c, v.c);
    const double x = load<double>(op.input<T>(1)[i]);
    const double h = (x - channel.mean) * channel.inv;
    const double through_moments = fixed ? 0 : (sums[c] + h * sums[v.c + c]) / count;
    double dy = load<double>(op.input<T>(0)[i]);
    if (has_relu(op) && !(normalized(channel, x, op.input<T>(2), op.input<T>(5), c) > 0)) {
      dy = 0;
    }
    op.output<T>(0)[i] =
        store<T>(load<double>(op.input<T>(2)[c]) * channel.inv * (dy - through_moments));
  });
}

}  // namespace

int64_t workspace(const OpContext& op, const DeviceSpec& spec) {
  return spec.backend == Backend::kCpu ? workspace_bytes(op)
                                       : DeviceScratch(op.input_shape(0), op.attributes()).bytes();
}

void moments(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { moments_fast<decltype(tag)>(op); });
}

void apply(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { apply_fast<decltype(tag)>(op); });
}

void grad_sums(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { grad_sums_fast<decltype(tag)>(op); });
}

void input_grad(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { input_grad_fast<decltype(tag)>(op); });
}

void moments_reference(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { moments_plain<decltype(tag)>(op); });
}

void apply_reference(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { apply_plain<decltype(tag)>(op); });
}

void grad_sums_reference(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { grad_sums_plain<decltype(tag)>(op); });
}

void input_grad_reference(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { input_grad_plain<decltype(tag)>(op); });
}

// ---- kernels over channels alone -------------------------------------------------------------

void statistics(KernelContext& op) {
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

void fixed_moments(KernelContext& op) {
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

void parameter_grad(KernelContext& op) {
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
void moments_grad(KernelContext& op) {
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

}  // namespace trainrt::batch_norm
