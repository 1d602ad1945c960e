// CUDA kernels of GroupNorm and its gradient (ops/group_norm.cc has the formulas). A team of lanes
// takes a group of an image, or the elements of a channel.
#include <cmath>

#include "ops/elementwise.cuh"
#include "ops/launch.cuh"

namespace trainrt {

namespace {

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
  T* y;
  C *mean_out, *inv_out;
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
        mean_out[row] = mean;
      }
      if (inv_out != nullptr) {
        inv_out[row] = inv;
      }
    }
  }
};

template <typename T>
struct GroupNormGradRow {
  using C = ComputeOf<T>;
  Groups v;
  const T *dy, *x, *scale;
  const C *mean, *inv;
  T* dx;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t row) const {
    const GroupNormGradRow& self = *this;
    const int64_t n = v.length(), base = row * n;
    const C m = mean[row], k = inv[row];
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
  const T *dy, *x;
  const C *mean, *inv;
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
             ((to_compute<C>(self.x[at(i)]) - self.mean[row]) * self.inv[row]);
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
                     context.output<ComputeOf<T>>(1),
                     context.output<ComputeOf<T>>(2),
                     static_cast<ComputeOf<T>>(context.attributes().get_float("epsilon", 1e-5))});
  });
}

void group_norm_grad_cuda(KernelContext& context) {
  const Groups v = groups_of(context, 1);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    using C = ComputeOf<T>;
    const T *dy = context.input<T>(0), *x = context.input<T>(1);
    const C *mean = context.input<C>(3), *inv = context.input<C>(4);
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

const RegisterCudaKernel kGroupNorm{"GroupNorm", group_norm_cuda};
const RegisterCudaKernel kGroupNormGrad{"GroupNormGrad", group_norm_grad_cuda};

}  // namespace

}  // namespace trainrt
