// CUDA kernels of LayerNormalization, RMSNormalization, GroupNorm and BatchNorm, and their
// gradients. ops/layer_norm.cc, ops/group_norm.cc and ops/batch_norm.cc have the formulas.
//
// A team of lanes takes a row, or the elements of a channel; nothing is added by atomics. Means and
// variances are summed in float32 around the mean, in double for float64.
#include <algorithm>
#include <cmath>

#include "ops/elementwise.cuh"
#include "ops/launch.cuh"
#include "ops/spatial.h"

namespace trainrt {

namespace {

// ---- rows: LayerNormalization and RMSNormalization
// ------------------------------------------------

struct Rows {
  int64_t rows, length;
};

Rows rows_of(const KernelContext& context, int input) {
  const Shape& x = context.input_shape(input);
  const int ndim = static_cast<int>(x.size());
  const int axis = normalize_axis(context.attributes().get_int("axis", -1), ndim);
  return {dims_product(x, 0, axis), dims_product(x, axis, ndim)};
}

template <typename T>
struct NormRow {
  using C = ComputeOf<T>;
  const T *x, *scale, *bias;
  T *y, *mean_out, *inv_out;
  int64_t n;
  bool centered;
  C epsilon;

  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t row) const {
    const T* from = x + row * n;
    T* to = y + row * n;
    const NormRow& self = *this;
    C mean = 0;
    if (centered) {
      mean = team_sum<C>(team, n, [from](int64_t j) { return to_compute<C>(from[j]); }) /
             static_cast<C>(n);
    }
    const C square = team_sum<C>(team, n, [from, mean](int64_t j) {
      const C d = to_compute<C>(from[j]) - mean;
      return d * d;
    });
    const C inv = C(1) / std::sqrt(square / static_cast<C>(n) + epsilon);
    team.for_each(n, [&self, from, to, mean, inv](int64_t j) {
      const C h = (to_compute<C>(from[j]) - mean) * inv * to_compute<C>(self.scale[j]);
      to[j] = to_storage<T>(self.bias == nullptr ? h : h + to_compute<C>(self.bias[j]));
    });
    if (team.leads()) {
      if (mean_out != nullptr) {
        mean_out[row] = to_storage<T>(mean);
      }
      if (inv_out != nullptr) {
        inv_out[row] = to_storage<T>(inv);
      }
    }
  }
};

template <bool kCentered>
void norm_cuda(KernelContext& context) {
  const Rows rows = rows_of(context, 0);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_teams(
        context,
        rows.rows,
        rows.length,
        NormRow<T>{context.input<T>(0),
                   context.input<T>(1),
                   kCentered ? context.input<T>(2) : nullptr,
                   context.output<T>(0),
                   kCentered ? context.output<T>(1) : nullptr,
                   context.output<T>(kCentered ? 2 : 1),
                   rows.length,
                   kCentered,
                   static_cast<ComputeOf<T>>(context.attributes().get_float("epsilon", 1e-5))});
  });
}

// dx may overwrite dy: a lane writes what it alone has read, after both sums.
template <typename T>
struct NormGradRow {
  using C = ComputeOf<T>;
  const T *dy, *x, *scale, *mean, *inv;
  T* dx;
  int64_t n;

  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t row) const {
    const C m = mean == nullptr ? C(0) : to_compute<C>(mean[row]), i = to_compute<C>(inv[row]);
    const int64_t base = row * n;
    const NormGradRow& self = *this;
    const auto g = [&self, base](int64_t j) {
      return to_compute<C>(self.dy[base + j]) * to_compute<C>(self.scale[j]);
    };
    const auto h = [&self, base, m, i](int64_t j) {
      return (to_compute<C>(self.x[base + j]) - m) * i;
    };
    C mean_g = 0;
    if (mean != nullptr) {
      mean_g = team_sum<C>(team, n, [&g](int64_t j) { return g(j); }) / static_cast<C>(n);
    }
    const C mean_gh =
        team_sum<C>(team, n, [&g, &h](int64_t j) { return g(j) * h(j); }) / static_cast<C>(n);
    team.for_each(n, [&self, &g, &h, base, i, mean_g, mean_gh](int64_t j) {
      self.dx[base + j] = to_storage<T>(i * (g(j) - mean_g - h(j) * mean_gh));
    });
  }
};

// dscale and dbias are sums down the columns. Neighbouring threads take neighbouring columns, each
// a segment of the rows, so that reads are whole; the segments' sums lie in the workspace as
// [segment][dscale, dbias][column] and are added in order.
template <typename T>
struct NormGradSegment {
  using C = ComputeOf<T>;
  const T *dy, *x, *mean, *inv;
  C* sums;
  int64_t rows, n, segment_rows;

  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t segment = index / n, j = index % n, first = segment * segment_rows;
    const int64_t end = first + segment_rows < rows ? first + segment_rows : rows;
    C dscale = 0, dbias = 0;
    for (int64_t row = first; row < end; ++row) {
      const C m = mean == nullptr ? C(0) : to_compute<C>(mean[row]);
      const C g = to_compute<C>(dy[row * n + j]);
      dscale += g * ((to_compute<C>(x[row * n + j]) - m) * to_compute<C>(inv[row]));
      dbias += g;
    }
    sums[2 * segment * n + j] = dscale;
    sums[(2 * segment + 1) * n + j] = dbias;
  }
};

template <typename T>
struct NormGradMerge {
  using C = ComputeOf<T>;
  const C* sums;
  T *dscale, *dbias;
  int64_t segments, n;

  TRAINRT_HOST_DEVICE C sum(int64_t which, int64_t j) const {
    C total = 0;
    for (int64_t segment = 0; segment < segments; ++segment) {
      total += sums[(2 * segment + which) * n + j];
    }
    return total;
  }
  TRAINRT_HOST_DEVICE void operator()(int64_t j) const {
    if (dscale != nullptr) {
      dscale[j] = to_storage<T>(sum(0, j));
    }
    if (dbias != nullptr) {
      dbias[j] = to_storage<T>(sum(1, j));
    }
  }
};

template <typename T>
void norm_column_sums(
    KernelContext& context, const Rows& rows, const T* mean, const T* inv, T* dbias) {
  using C = ComputeOf<T>;
  C* sums = reinterpret_cast<C*>(context.workspace().data());
  const int64_t room = static_cast<int64_t>(context.workspace().size() / sizeof(C));
  const int64_t most = std::max<int64_t>(1, room / std::max<int64_t>(1, 2 * rows.length));
  const int64_t segment_rows = std::max<int64_t>(1, (rows.rows + most - 1) / most);
  const int64_t segments = (rows.rows + segment_rows - 1) / segment_rows;
  launch(context,
         segments * rows.length,
         NormGradSegment<T>{context.input<T>(0),
                            context.input<T>(1),
                            mean,
                            inv,
                            sums,
                            rows.rows,
                            rows.length,
                            segment_rows});
  launch(context,
         rows.length,
         NormGradMerge<T>{sums, context.output<T>(1), dbias, segments, rows.length});
}

template <bool kCentered>
void norm_grad_cuda(KernelContext& context) {
  const Rows rows = rows_of(context, 1);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T* mean = kCentered ? context.input<T>(3) : nullptr;
    const T* inv = context.input<T>(kCentered ? 4 : 3);
    T* dbias = kCentered ? context.output<T>(2) : nullptr;
    if (context.has_output(1) || dbias != nullptr) {  // before dx, which may overwrite dy
      norm_column_sums(context, rows, mean, inv, dbias);
    }
    if (context.has_output(0)) {
      launch_teams(context,
                   rows.rows,
                   rows.length,
                   NormGradRow<T>{context.input<T>(0),
                                  context.input<T>(1),
                                  context.input<T>(2),
                                  mean,
                                  inv,
                                  context.output<T>(0),
                                  rows.length});
    }
  });
}

// ---- GroupNorm
// -----------------------------------------------------------------------------------

struct Groups {
  int64_t n, groups, channels, s;  // channels per group, positions per channel
  TRAINRT_HOST_DEVICE int64_t length() const { return channels * s; }
  TRAINRT_HOST_DEVICE int64_t c() const { return groups * channels; }
  // The channel of element i of group `row` (of n * groups).
  TRAINRT_HOST_DEVICE int64_t channel(int64_t row, int64_t i) const {
    return row % groups * channels + i / s;
  }
};

Groups groups_of(const KernelContext& context, int input) {
  const Shape& x = context.input_shape(input);
  const int64_t groups = context.attributes().get_int("num_groups");
  return {x[0], groups, x[1] / groups, dims_product(x, 2, static_cast<int>(x.size()))};
}

template <typename T>
struct GroupNormRow {
  using C = ComputeOf<T>;
  Groups v;
  const T *x, *scale, *bias;
  T *y, *mean_out, *inv_out;
  C epsilon;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t row) const {
    const GroupNormRow& self = *this;
    const int64_t n = v.length(), base = row * n;
    const C mean =
        team_sum<C>(team, n, [&self, base](int64_t i) { return to_compute<C>(self.x[base + i]); }) /
        static_cast<C>(n);
    const C square = team_sum<C>(team, n, [&self, base, mean](int64_t i) {
      const C d = to_compute<C>(self.x[base + i]) - mean;
      return d * d;
    });
    const C inv = C(1) / std::sqrt(square / static_cast<C>(n) + epsilon);
    team.for_each(n, [&self, base, row, mean, inv](int64_t i) {
      const int64_t channel = self.v.channel(row, i);
      self.y[base + i] = to_storage<T>((to_compute<C>(self.x[base + i]) - mean) *
                                           (inv * to_compute<C>(self.scale[channel])) +
                                       to_compute<C>(self.bias[channel]));
    });
    if (team.leads()) {
      if (mean_out != nullptr) {
        mean_out[row] = to_storage<T>(mean);
      }
      if (inv_out != nullptr) {
        inv_out[row] = to_storage<T>(inv);
      }
    }
  }
};

template <typename T>
struct GroupNormGradRow {
  using C = ComputeOf<T>;
  Groups v;
  const T *dy, *x, *scale, *mean, *inv;
  T* dx;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t row) const {
    const GroupNormGradRow& self = *this;
    const int64_t n = v.length(), base = row * n;
    const C m = to_compute<C>(mean[row]), k = to_compute<C>(inv[row]);
    const auto g = [&self, base, row](int64_t i) {
      return to_compute<C>(self.dy[base + i]) * to_compute<C>(self.scale[self.v.channel(row, i)]);
    };
    const auto h = [&self, base, m, k](int64_t i) {
      return (to_compute<C>(self.x[base + i]) - m) * k;
    };
    const C mean_g = team_sum<C>(team, n, [&g](int64_t i) { return g(i); }) / static_cast<C>(n);
    const C mean_gh =
        team_sum<C>(team, n, [&g, &h](int64_t i) { return g(i) * h(i); }) / static_cast<C>(n);
    team.for_each(n, [&self, &g, &h, base, k, mean_g, mean_gh](int64_t i) {
      self.dx[base + i] = to_storage<T>(k * (g(i) - mean_g - h(i) * mean_gh));
    });
  }
};

template <typename T>
struct GroupNormGradChannel {
  using C = ComputeOf<T>;
  Groups v;
  const T *dy, *x, *mean, *inv;
  T *dscale, *dbias;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t channel) const {
    const GroupNormGradChannel& self = *this;
    const auto at = [&self, channel](int64_t i) {  // element i of all images' planes
      return (i / self.v.s * self.v.c() + channel) * self.v.s + i % self.v.s;
    };
    const int64_t count = v.n * v.s;
    const C sum_h = team_sum<C>(team, count, [&self, &at, channel](int64_t i) {
      const int64_t row = i / self.v.s * self.v.groups + channel / self.v.channels;
      return to_compute<C>(self.dy[at(i)]) *
             ((to_compute<C>(self.x[at(i)]) - to_compute<C>(self.mean[row])) *
              to_compute<C>(self.inv[row]));
    });
    const C sum =
        team_sum<C>(team, count, [&self, &at](int64_t i) { return to_compute<C>(self.dy[at(i)]); });
    if (team.leads()) {
      if (dscale != nullptr) {
        dscale[channel] = to_storage<T>(sum_h);
      }
      if (dbias != nullptr) {
        dbias[channel] = to_storage<T>(sum);
      }
    }
  }
};

void group_norm_cuda(KernelContext& context) {
  const Groups v = groups_of(context, 0);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_teams(context,
                 v.n * v.groups,
                 v.length(),
                 GroupNormRow<T>{
                     v,
                     context.input<T>(0),
                     context.input<T>(1),
                     context.input<T>(2),
                     context.output<T>(0),
                     context.output<T>(1),
                     context.output<T>(2),
                     static_cast<ComputeOf<T>>(context.attributes().get_float("epsilon", 1e-5))});
  });
}

void group_norm_grad_cuda(KernelContext& context) {
  const Groups v = groups_of(context, 1);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T *dy = context.input<T>(0), *x = context.input<T>(1), *mean = context.input<T>(3),
            *inv = context.input<T>(4);
    if (context.has_output(1) || context.has_output(2)) {
      launch_teams(
          context,
          v.c(),
          v.n * v.s,
          GroupNormGradChannel<T>{v, dy, x, mean, inv, context.output<T>(1), context.output<T>(2)});
    }
    if (context.has_output(0)) {
      launch_teams(
          context,
          v.n * v.groups,
          v.length(),
          GroupNormGradRow<T>{v, dy, x, context.input<T>(2), mean, inv, context.output<T>(0)});
    }
  });
}

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

const RegisterCudaKernel kLayerNorm{"LayerNormalization", norm_cuda<true>};
const RegisterCudaKernel kLayerNormGrad{"LayerNormGrad", norm_grad_cuda<true>};
const RegisterCudaKernel kRmsNorm{"RMSNormalization", norm_cuda<false>};
const RegisterCudaKernel kRmsNormGrad{"RMSNormGrad", norm_grad_cuda<false>};
const RegisterCudaKernel kGroupNorm{"GroupNorm", group_norm_cuda};
const RegisterCudaKernel kGroupNormGrad{"GroupNormGrad", group_norm_grad_cuda};
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
