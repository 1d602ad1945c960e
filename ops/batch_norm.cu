// CUDA kernels of BatchNorm's operators (ops/batch_norm.cc has the formulas). Nothing is added by
// atomics.
//
// Not through cuDNN: its normalisation takes the statistics of what one call sees, where ours are
// sums that micro-batches and ranks add up in order before anything is normalised, and its sums
// alone (GENSTATS) are float32, where the variance is a difference of two.
#include <cmath>

#include "ops/batch_norm_elements.cuh"
#include "ops/batch_norm_scratch.h"
#include "ops/elementwise.cuh"
#include "ops/launch.cuh"

namespace trainrt {

namespace {

// ---- BatchNorm: over images -------------------------------------------------------------------

using batch_norm::Affine;
using batch_norm::BatchNormElement;
using batch_norm::BatchNormInputGradElement;
using batch_norm::BatchNormInputGradPacks;
using batch_norm::BatchNormPacks;
using batch_norm::DeviceScratch;
using batch_norm::Image;
using batch_norm::kPackRows;
using batch_norm::Slopes;

Image image_of(const DeviceScratch& scratch) {
  return {scratch.n, scratch.c, scratch.s, scratch.columns};
}

DeviceScratch scratch_of(const KernelContext& context) {
  return {context.input_shape(0), context.attributes()};
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

template <typename T>
struct MakeAffine {
  using C = ComputeOf<T>;
  ChannelStatistics statistics;
  const T *scale, *bias;
  Affine<C> made;
  TRAINRT_HOST_DEVICE void operator()(int64_t channel) const {
    made.mean[channel] = static_cast<C>(statistics.mean(channel));
    made.factor[channel] = static_cast<C>(statistics.inv(channel)) * to_compute<C>(scale[channel]);
    made.shift[channel] = to_compute<C>(bias[channel]);
  }
};

// Array `which` of the workspace's first ones.
template <typename C>
C* coefficients(const KernelContext& context, int64_t c, int which) {
  return reinterpret_cast<C*>(reinterpret_cast<double*>(context.workspace().data()) + which * c);
}

template <typename T>
Affine<ComputeOf<T>> make_affine(KernelContext& context,
                                 const ChannelStatistics& statistics,
                                 int scale,
                                 int bias) {
  using C = ComputeOf<T>;
  const int64_t c = statistics.c;
  const Affine<C> made{coefficients<C>(context, c, 0),
                       coefficients<C>(context, c, 1),
                       coefficients<C>(context, c, 2)};
  launch(
      context, c, MakeAffine<T>{statistics, context.input<T>(scale), context.input<T>(bias), made});
  return made;
}

bool has_relu(const KernelContext& context) {
  return context.attributes().get_int("relu", 0) != 0;
}

struct Pair {
  double a, b;
};

// Terms of the sums of x and x^2, or of dy and dy h, of a channel. In double: the variance is a
// difference.
template <typename T>
struct ChannelTerms {
  using C = ComputeOf<T>;
  Image v;
  const T *first, *x;  // x: null for the moments
  ChannelStatistics statistics;
  bool relu;  // only what passed it
  Affine<C> affine;

  struct Center {
    double mean, inv;
  };
  TRAINRT_HOST_DEVICE Center center(int64_t channel) const {
    return x == nullptr ? Center{0, 1} : Center{statistics.mean(channel), statistics.inv(channel)};
  }
  TRAINRT_HOST_DEVICE Pair term(int64_t channel, int64_t at, const Center& center) const {
    double value = to_compute<double>(first[at]);
    if (relu && !(affine(to_compute<C>(x[at]), channel) > C(0))) {
      value = 0;
    }
    return {
        value,
        value * (x == nullptr ? value : (to_compute<double>(x[at]) - center.mean) * center.inv)};
  }
};

// A team per channel.
template <typename T>
struct ChannelSums {
  ChannelTerms<T> terms;
  double* out;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t channel) const {
    const ChannelTerms<T>& t = terms;
    const auto center = t.center(channel);
    const Pair sums = team.reduce(
        t.v.n * t.v.s,
        Pair{0, 0},
        [&t, channel, center](int64_t i) { return t.term(channel, t.v.at(channel, i), center); },
        [](const Pair& p, const Pair& q) {
          return Pair{p.a + q.a, p.b + q.b};
        });
    if (team.leads()) {
      out[channel] = sums.a;
      out[t.v.c + channel] = sums.b;
    }
  }
};

// Neighbouring threads take neighbouring channels, each a segment of the rows, so that reads are
// whole; the segments' sums, [segment][2][channel], are added in order.
template <typename T>
struct ColumnSums {
  ChannelTerms<T> terms;
  int64_t segment_rows;
  double* partial;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t c = terms.v.c, rows = terms.v.n * terms.v.s;
    const int64_t segment = index / c, channel = index % c, first = segment * segment_rows;
    const int64_t end = first + segment_rows < rows ? first + segment_rows : rows;
    const auto center = terms.center(channel);
    Pair sums{0, 0};
    for (int64_t row = first; row < end; ++row) {
      const Pair term = terms.term(channel, row * c + channel, center);
      sums.a += term.a;
      sums.b += term.b;
    }
    partial[2 * segment * c + channel] = sums.a;
    partial[(2 * segment + 1) * c + channel] = sums.b;
  }
};

// A team per sum: a thread alone would wait for thousands of loads. Neighbouring teams read the
// same words.
struct AddSegments {
  const double* partial;
  int64_t segments, stride;
  double* out;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t i) const {
    const double* from = partial + i;
    const int64_t step = stride;
    const double sum =
        team_sum<double>(team, segments, [from, step](int64_t k) { return from[k * step]; });
    if (team.leads()) {
      out[i] = sum;
    }
  }
};

template <typename T>
void sum_channels(KernelContext& context,
                  const DeviceScratch& scratch,
                  const ChannelTerms<T>& terms) {
  double* out = context.output<double>(0);
  const int64_t rows = scratch.n * scratch.s;
  if (!scratch.columns) {
    launch_teams(context, scratch.c, rows, ChannelSums<T>{terms, out});
    return;
  }
  double* partial = reinterpret_cast<double*>(context.workspace().data()) +
                    DeviceScratch::kCoefficients * scratch.c;
  const int64_t segment_rows = (rows + scratch.segments - 1) / scratch.segments;
  launch(context, scratch.segments * scratch.c, ColumnSums<T>{terms, segment_rows, partial});
  launch_teams(context,
               2 * scratch.c,
               scratch.segments,
               AddSegments{partial, scratch.segments, 2 * scratch.c, out});
}

template <typename T>
struct MakeSlopes {
  using C = ComputeOf<T>;
  ChannelStatistics statistics;
  const T* scale;
  const double* sums;
  bool fixed;
  Slopes<C> made;
  TRAINRT_HOST_DEVICE void operator()(int64_t channel) const {
    const double inv = statistics.inv(channel), mean = statistics.mean(channel);
    const double slope = fixed ? 0 : inv * sums[statistics.c + channel] / statistics.count;
    const double shift = fixed ? 0 : sums[channel] / statistics.count - mean * slope;
    made.factor[channel] = static_cast<C>(to_compute<double>(scale[channel]) * inv);
    made.slope[channel] = static_cast<C>(slope);
    made.shift[channel] = static_cast<C>(shift);
  }
};

// `element` for every element of an image, in packs where the channels lie so. `data`: its tensors.
template <typename Packs, typename Element>
void launch_elements(KernelContext& context,
                     const DeviceScratch& scratch,
                     const Element& element,
                     std::initializer_list<const void*> data) {
  const int64_t rows = scratch.n * scratch.s, packs = scratch.c / Packs::kCount;
  const std::byte* coefficients = context.workspace().data();
  if (scratch.columns && takes_packs(scratch.c, Packs::kCount, data) &&
      takes_packs(scratch.c, Packs::kCount, {coefficients})) {
    launch(context, (rows + kPackRows - 1) / kPackRows * packs, Packs{element});
  } else {
    launch(context, rows * scratch.c, element);
  }
}

void moments_cuda(KernelContext& context) {
  const DeviceScratch scratch = scratch_of(context);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    sum_channels(context,
                 scratch,
                 ChannelTerms<T>{image_of(scratch), context.input<T>(0), nullptr, {}, false, {}});
  });
}

void grad_sums_cuda(KernelContext& context) {
  const DeviceScratch scratch = scratch_of(context);
  const ChannelStatistics statistics = statistics_of(context, 2, scratch.c);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    Affine<ComputeOf<T>> affine{};
    if (has_relu(context)) {
      affine = make_affine<T>(context, statistics, 3, 4);
    }
    sum_channels(context,
                 scratch,
                 ChannelTerms<T>{image_of(scratch),
                                 context.input<T>(0),
                                 context.input<T>(1),
                                 statistics,
                                 has_relu(context),
                                 affine});
  });
}

void apply_cuda(KernelContext& context) {
  const DeviceScratch scratch = scratch_of(context);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const BatchNormElement<T> element{
        image_of(scratch),
        context.input<T>(0),
        context.input<T>(4),
        context.output<T>(0),
        make_affine<T>(context, statistics_of(context, 1, scratch.c), 2, 3),
        has_relu(context)};
    launch_elements<BatchNormPacks<T>>(
        context, scratch, element, {element.x, element.residual, element.y});
  });
}

void input_grad_cuda(KernelContext& context) {
  const DeviceScratch scratch = scratch_of(context);
  const int64_t c = scratch.c;
  const ChannelStatistics statistics = statistics_of(context, 3, c);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    using C = ComputeOf<T>;
    Affine<C> affine{};
    if (has_relu(context)) {
      affine = make_affine<T>(context, statistics, 2, 5);
    }
    const Slopes<C> slopes{coefficients<C>(context, c, 3),
                           coefficients<C>(context, c, 4),
                           coefficients<C>(context, c, 5)};
    launch(context,
           c,
           MakeSlopes<T>{statistics,
                         context.input<T>(2),
                         context.input<double>(4),
                         context.attributes().get_int("fixed", 0) != 0,
                         slopes});
    const BatchNormInputGradElement<T> element{image_of(scratch),
                                               context.input<T>(0),
                                               context.input<T>(1),
                                               context.output<T>(0),
                                               has_relu(context),
                                               affine,
                                               slopes};
    launch_elements<BatchNormInputGradPacks<T>>(
        context, scratch, element, {element.dy, element.x, element.dx});
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
