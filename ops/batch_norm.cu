// CUDA kernels of BatchNorm's operators (ops/batch_norm.cc has the formulas). A team of lanes takes
// the elements of a channel; nothing is added by atomics.
#include <cmath>

#include "ops/elementwise.cuh"
#include "ops/launch.cuh"
#include "ops/spatial.h"

namespace trainrt {

namespace {

// ---- BatchNorm: sums over all but the channel -------------------------------------------------

struct Image {
  int64_t n, c, s;
  bool columns;  // channels are contiguous
  TRAINRT_HOST_DEVICE int64_t channel(int64_t i) const { return columns ? i % c : i / s % c; }
  // Element i of the n * s of a channel.
  TRAINRT_HOST_DEVICE int64_t at(int64_t channel, int64_t i) const {
    return columns ? i * c + channel : (i / s * c + channel) * s + i % s;
  }
};

Image image_of(const KernelContext& context) {
  const bool last = context.attributes().get_string("layout", "nchw") == "nhwc";
  const ImageShape image = image_shape(context.input_shape(0), last);
  const int64_t s = num_elements(image.spatial);
  return {image.n, image.c, s, last || s == 1};
}

// Mean and 1 / standard deviation of a channel, from sums of x and x^2.
struct ChannelStatistics {
  const double* moments;
  int64_t c;
  double count, epsilon;
  TRAINRT_HOST_DEVICE double mean(int64_t channel) const { return moments[channel] / count; }
  TRAINRT_HOST_DEVICE double variance(int64_t channel) const {
    const double m = mean(channel), v = moments[c + channel] / count - m * m;
    return v > 0 ? v : 0;
  }
  TRAINRT_HOST_DEVICE double inv(int64_t channel) const {
    return 1 / std::sqrt(variance(channel) + epsilon);
  }
};

ChannelStatistics statistics_of(const KernelContext& context, int input, int64_t c) {
  return {context.input<double>(input),
          c,
          static_cast<double>(context.attributes().get_int("count")),
          context.attributes().get_float("epsilon", 1e-5)};
}

// What BatchNormApply makes of an element before the ReLU; again from x in the gradients, by the
// same arithmetic.
template <typename T>
struct Affine {
  using C = ComputeOf<T>;
  ChannelStatistics statistics;
  const T *scale, *bias;
  TRAINRT_HOST_DEVICE C operator()(C x, int64_t channel) const {
    const C factor = static_cast<C>(statistics.inv(channel)) * to_compute<C>(scale[channel]);
    return (x - static_cast<C>(statistics.mean(channel))) * factor + to_compute<C>(bias[channel]);
  }
};

bool has_relu(const KernelContext& context) {
  return context.attributes().get_int("relu", 0) != 0;
}

struct Pair {
  double a, b;
};

// Sums of x and x^2, or of dy and dy h, of a channel. In double: the variance is a difference.
template <typename T>
struct ChannelSums {
  using C = ComputeOf<T>;
  Image v;
  const T *first, *x;  // x: null for the moments
  ChannelStatistics statistics;
  bool relu;  // only what passed it
  Affine<T> affine;
  double* out;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t channel) const {
    const ChannelSums& self = *this;
    const double mean = x == nullptr ? 0 : statistics.mean(channel);
    const double inv = x == nullptr ? 1 : statistics.inv(channel);
    const Pair sums = team.reduce(
        v.n * v.s,
        Pair{0, 0},
        [&self, channel, mean, inv](int64_t i) {
          const int64_t at = self.v.at(channel, i);
          double value = to_compute<double>(self.first[at]);
          if (self.relu && !(self.affine(to_compute<C>(self.x[at]), channel) > C(0))) {
            value = 0;
          }
          return Pair{
              value,
              value * (self.x == nullptr ? value : (to_compute<double>(self.x[at]) - mean) * inv)};
        },
        [](const Pair& p, const Pair& q) {
          return Pair{p.a + q.a, p.b + q.b};
        });
    if (team.leads()) {
      out[channel] = sums.a;
      out[v.c + channel] = sums.b;
    }
  }
};

template <typename T>
struct BatchNormElement {
  using C = ComputeOf<T>;
  Image v;
  const T *x, *residual;
  T* y;
  Affine<T> affine;
  bool relu;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    C h = affine(to_compute<C>(x[i]), v.channel(i));
    if (residual != nullptr) {
      h += to_compute<C>(residual[i]);
    }
    y[i] = to_storage<T>(relu && h < C(0) ? C(0) : h);  // NaN stays
  }
};

template <typename T>
struct BatchNormInputGradElement {
  using C = ComputeOf<T>;
  Image v;
  const T *dy, *x, *scale;
  const double* sums;
  T* dx;
  ChannelStatistics statistics;
  bool fixed;
  bool relu;
  Affine<T> affine;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t channel = v.channel(i);
    const C value = to_compute<C>(x[i]);
    const bool passed = !relu || affine(value, channel) > C(0);
    const C grad = passed ? to_compute<C>(dy[i]) : C(0);
    const double inv = statistics.inv(channel), mean = statistics.mean(channel);
    const double slope = fixed ? 0 : inv * sums[v.c + channel] / statistics.count;
    const double shift = fixed ? 0 : sums[channel] / statistics.count - mean * slope;
    const C factor = static_cast<C>(to_compute<double>(scale[channel]) * inv);
    dx[i] =
        to_storage<T>(factor * (grad - (value * static_cast<C>(slope) + static_cast<C>(shift))));
  }
};

void moments_cuda(KernelContext& context) {
  const Image v = image_of(context);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_teams(
        context,
        v.c,
        v.n * v.s,
        ChannelSums<T>{v, context.input<T>(0), nullptr, {}, false, {}, context.output<double>(0)});
  });
}

void grad_sums_cuda(KernelContext& context) {
  const Image v = image_of(context);
  const ChannelStatistics statistics = statistics_of(context, 2, v.c);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_teams(context,
                 v.c,
                 v.n * v.s,
                 ChannelSums<T>{v,
                                context.input<T>(0),
                                context.input<T>(1),
                                statistics,
                                has_relu(context),
                                {statistics, context.input<T>(3), context.input<T>(4)},
                                context.output<double>(0)});
  });
}

void apply_cuda(KernelContext& context) {
  const Image v = image_of(context);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           v.n * v.c * v.s,
           BatchNormElement<T>{
               v,
               context.input<T>(0),
               context.input<T>(4),
               context.output<T>(0),
               {statistics_of(context, 1, v.c), context.input<T>(2), context.input<T>(3)},
               has_relu(context)});
  });
}

void input_grad_cuda(KernelContext& context) {
  const Image v = image_of(context);
  const ChannelStatistics statistics = statistics_of(context, 3, v.c);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           v.n * v.c * v.s,
           BatchNormInputGradElement<T>{v,
                                        context.input<T>(0),
                                        context.input<T>(1),
                                        context.input<T>(2),
                                        context.input<double>(4),
                                        context.output<T>(0),
                                        statistics,
                                        context.attributes().get_int("fixed", 0) != 0,
                                        has_relu(context),
                                        {statistics, context.input<T>(2), context.input<T>(5)}});
  });
}

// ---- BatchNorm: over channels alone -----------------------------------------------------------

template <typename T>
struct Statistics {
  ChannelStatistics statistics;
  T *mean, *variance;
  TRAINRT_HOST_DEVICE void operator()(int64_t channel) const {
    if (mean != nullptr) {
      mean[channel] = to_storage<T>(statistics.mean(channel));
    }
    if (variance != nullptr) {
      variance[channel] = to_storage<T>(statistics.variance(channel));
    }
  }
};

template <typename T>
struct FixedMoments {
  const T *mean, *variance;
  double* moments;
  int64_t c;
  TRAINRT_HOST_DEVICE void operator()(int64_t channel) const {
    const double m = to_compute<double>(mean[channel]);
    moments[channel] = m;
    moments[c + channel] = to_compute<double>(variance[channel]) + m * m;
  }
};

template <typename T>
struct ParameterGrad {
  const double* sums;
  T *dscale, *dbias;
  int64_t c;
  TRAINRT_HOST_DEVICE void operator()(int64_t channel) const {
    if (dscale != nullptr) {
      dscale[channel] = to_storage<T>(sums[c + channel]);
    }
    if (dbias != nullptr) {
      dbias[channel] = to_storage<T>(sums[channel]);
    }
  }
};

template <typename T>
struct MomentsGrad {
  ChannelStatistics statistics;
  const double* sums;
  const T* scale;
  double* out;
  TRAINRT_HOST_DEVICE void operator()(int64_t channel) const {
    const int64_t c = statistics.c;
    const double inv = statistics.inv(channel), k = to_compute<double>(scale[channel]) * inv;
    const double dvar = -0.5 * k * inv * sums[c + channel];
    out[channel] = (-k * sums[channel] - 2 * statistics.mean(channel) * dvar) / statistics.count;
    out[c + channel] = dvar / statistics.count;
  }
};

void statistics_cuda(KernelContext& context) {
  const int64_t c = context.input_shape(0)[1];
  const int present = context.has_output(0) ? 0 : 1;
  dispatch_stored(context.node(), context.output_dtype(present), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           c,
           Statistics<T>{statistics_of(context, 0, c), context.output<T>(0), context.output<T>(1)});
  });
}

void fixed_moments_cuda(KernelContext& context) {
  const int64_t c = context.input_shape(0)[0];
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           c,
           FixedMoments<T>{context.input<T>(0), context.input<T>(1), context.output<double>(0), c});
  });
}

void parameter_grad_cuda(KernelContext& context) {
  const int64_t c = context.input_shape(0)[1];
  const int present = context.has_output(0) ? 0 : 1;
  dispatch_stored(context.node(), context.output_dtype(present), [&](auto tag) {
    using T = decltype(tag);
    launch(
        context,
        c,
        ParameterGrad<T>{context.input<double>(0), context.output<T>(0), context.output<T>(1), c});
  });
}

void moments_grad_cuda(KernelContext& context) {
  const int64_t c = context.input_shape(0)[1];
  dispatch_stored(context.node(), context.input_dtype(2), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           c,
           MomentsGrad<T>{statistics_of(context, 1, c),
                          context.input<double>(0),
                          context.input<T>(2),
                          context.output<double>(0)});
  });
}

const RegisterCudaKernel kMoments{"BatchNormMoments", moments_cuda};
const RegisterCudaKernel kApply{"BatchNormApply", apply_cuda};
const RegisterCudaKernel kGradSums{"BatchNormGradSums", grad_sums_cuda};
const RegisterCudaKernel kInputGrad{"BatchNormInputGrad", input_grad_cuda};
const RegisterCudaKernel kStatistics{"BatchNormStatistics", statistics_cuda};
const RegisterCudaKernel kParameterGrad{"BatchNormParameterGrad", parameter_grad_cuda};
const RegisterCudaKernel kFixedMoments{"BatchNormFixedMoments", fixed_moments_cuda};
const RegisterCudaKernel kMomentsGrad{"BatchNormMomentsGrad", moments_grad_cuda};

}  // namespace

}  // namespace trainrt
