// CUDA kernels of GroupNorm and its gradient (ops/group_norm.cc has the formulas). Where channels
// are planes, a team of lanes takes a group of an image, or the elements of a channel. Where they
// lie side by side, sums are made in parts as BatchNorm's are, and a team per group of an image
// makes of them the numbers of its channels, with which elements are computed in packs.
#include <cmath>

#include "ops/channel_pack.cuh"
#include "ops/elementwise.cuh"
#include "ops/group_norm.h"
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

Groups groups_of(const KernelContext& context) {
  const group_norm::GroupView v = group_norm::view_of(context);
  return {v.n, v.groups, v.channels, v.s};
}

// ---- channels in planes ----------------------------------------------------------------------

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

// ---- channels side by side -------------------------------------------------------------------

using group_norm::Scratch;

// The workspace: ops/group_norm.h says what lies where.
struct Room {
  Scratch scratch;
  double* data;
  TRAINRT_HOST_DEVICE double* sums() const {
    return data + 2 * scratch.n * scratch.parts * scratch.c;
  }
  // Array `which` of the numbers, as C.
  template <typename C>
  TRAINRT_HOST_DEVICE C* numbers(int which) const {
    return reinterpret_cast<C*>(sums() + (2 + which) * scratch.n * scratch.c);
  }
};

Room room_of(KernelContext& context) {
  return {group_norm::device_scratch(group_norm::view_of(context)),
          reinterpret_cast<double*>(context.workspace().data())};
}

// Neighbouring threads take neighbouring channels of a part of an image. The sums of x and x^2, or
// of dy and dy h, in double: a variance is a difference.
template <typename T>
struct GroupNormParts {
  using C = ComputeOf<T>;
  Groups v;
  Scratch scratch;
  const T *first, *x;  // x: null for the moments
  const C *mean, *inv;
  double* partial;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const Quotient place = divide(index, scratch.c), image = divide(place.quotient, scratch.parts);
    const int64_t channel = place.remainder, begin = image.remainder * scratch.part;
    const int64_t end = begin + scratch.part < v.s ? begin + scratch.part : v.s;
    const int64_t row = image.quotient * v.groups + divide(channel, v.channels).quotient;
    const double m = x == nullptr ? 0.0 : static_cast<double>(mean[row]),
                 k = x == nullptr ? 1.0 : static_cast<double>(inv[row]);
    double a = 0, b = 0;
    for (int64_t p = begin; p < end; ++p) {
      const int64_t at = (image.quotient * v.s + p) * scratch.c + channel;
      const double value = to_compute<double>(first[at]);
      a += value;
      b += value * (x == nullptr ? value : (to_compute<double>(x[at]) - m) * k);
    }
    partial[2 * place.quotient * scratch.c + channel] = a;
    partial[(2 * place.quotient + 1) * scratch.c + channel] = b;
  }
};

// Sums of an image from those of its parts: a team per sum; i in [n][2][c].
struct AddParts {
  Room room;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t i) const {
    const int64_t step = 2 * room.scratch.c, parts = room.scratch.parts;
    const Quotient image = divide(i, step);
    const double* from = room.data + image.quotient * parts * step + image.remainder;
    const double sum =
        team_sum<double>(team, parts, [from, step](int64_t k) { return from[k * step]; });
    if (team.leads()) {
      room.sums()[i] = sum;
    }
  }
};

// y = (x - number 0) number 1 + number 2.
template <typename T>
struct GroupNormNumbers {
  using C = ComputeOf<T>;
  Groups v;
  Room room;
  const T *scale, *bias;
  C *mean_out, *inv_out;
  double epsilon;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t row) const {
    const GroupNormNumbers& self = *this;
    const int64_t n = row / v.groups, first = row % v.groups * v.channels, c = v.c();
    const double* sums = room.sums() + 2 * n * c + first;
    const double count = static_cast<double>(v.length());
    const double mean =
        team_sum<double>(team, v.channels, [sums](int64_t k) { return sums[k]; }) / count;
    const double square =
        team_sum<double>(team, v.channels, [sums, c](int64_t k) { return sums[c + k]; }) / count;
    const double variance = square - mean * mean;
    const double inv = 1 / std::sqrt((variance < 0 ? 0 : variance) + epsilon);  // NaN stays
    team.for_each(v.channels, [&self, n, c, first, mean, inv](int64_t k) {
      const int64_t at = n * c + first + k;
      self.room.template numbers<C>(0)[at] = static_cast<C>(mean);
      self.room.template numbers<C>(1)[at] =
          static_cast<C>(inv) * to_compute<C>(self.scale[first + k]);
      self.room.template numbers<C>(2)[at] = to_compute<C>(self.bias[first + k]);
    });
    if (team.leads()) {
      if (mean_out != nullptr) {
        mean_out[row] = static_cast<C>(mean);
      }
      if (inv_out != nullptr) {
        inv_out[row] = static_cast<C>(inv);
      }
    }
  }
};

// dx = dy number 0 - (x number 1 + number 2).
template <typename T>
struct GroupNormGradNumbers {
  using C = ComputeOf<T>;
  Groups v;
  Room room;
  const T* scale;
  const C *mean, *inv;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t row) const {
    const GroupNormGradNumbers& self = *this;
    const int64_t n = row / v.groups, first = row % v.groups * v.channels, c = v.c();
    const double* sums = room.sums() + 2 * n * c + first;
    const double count = static_cast<double>(v.length());
    const auto weight = [&self, first](int64_t k) {
      return to_compute<double>(self.scale[first + k]);
    };
    const double mean_g =
        team_sum<double>(team, v.channels, [&](int64_t k) { return weight(k) * sums[k]; }) / count;
    const double mean_gh =
        team_sum<double>(team, v.channels, [&](int64_t k) { return weight(k) * sums[c + k]; }) /
        count;
    const double k = static_cast<double>(inv[row]), slope = k * k * mean_gh;
    const double shift = k * mean_g - static_cast<double>(mean[row]) * slope;
    team.for_each(v.channels, [&](int64_t channel) {
      const int64_t at = n * c + first + channel;
      self.room.template numbers<C>(0)[at] = static_cast<C>(k * weight(channel));
      self.room.template numbers<C>(1)[at] = static_cast<C>(slope);
      self.room.template numbers<C>(2)[at] = static_cast<C>(shift);
    });
  }
};

// dbias and dscale, i in [2][c]: the sums of the images.
template <typename T>
struct GroupNormParameterGrad {
  Room room;
  T *dscale, *dbias;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t i) const {
    const int64_t c = room.scratch.c;
    T* out = i < c ? dbias : dscale;
    if (out == nullptr) {
      return;
    }
    const double* from = room.sums() + i;
    const double sum =
        team_sum<double>(team, room.scratch.n, [from, c](int64_t n) { return from[2 * n * c]; });
    if (team.leads()) {
      out[i < c ? i : i - c] = to_storage<T>(sum);
    }
  }
};

// Elements of kCount channels of kRows positions of an image: all are read before the first is
// written, which may lie over one of them. kGrad: dx from dy and x; else y from x, which `dy` is.
template <typename T, int kCount, bool kGrad>
struct GroupNormPacks {
  using C = ComputeOf<T>;
  static constexpr int kRows = 4;
  int64_t s, c;
  const T *dy, *x;
  T* out;
  const C *a, *b, *d;  // the numbers
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const Quotient place = divide(index, c / kCount);
    const Quotient image = divide(place.quotient, (s + kRows - 1) / kRows);
    const int64_t channel = place.remainder * kCount, row = image.remainder * kRows;
    const int64_t first = (image.quotient * s + row) * c + channel;
    ChannelPack<T, kCount> grads[kRows], values[kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (row + k < s) {
        values[k] = load_pack<kCount>(x + first + k * c);
        if (kGrad) {
          grads[k] = load_pack<kCount>(dy + first + k * c);
        }
      }
    }
    const int64_t numbers = image.quotient * c + channel;
    const auto p = load_pack<kCount>(a + numbers), q = load_pack<kCount>(b + numbers),
               r = load_pack<kCount>(d + numbers);
#pragma unroll
    for (int k = 0; k < kRows; ++k) {
      if (row + k < s) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          const C value = to_compute<C>(values[k].values[j]);
          values[k].values[j] =
              to_storage<T>(kGrad ? to_compute<C>(grads[k].values[j]) * p.values[j] -
                                        (value * q.values[j] + r.values[j])
                                  : (value - p.values[j]) * q.values[j] + r.values[j]);
        }
        store_pack<kCount>(out + first + k * c, values[k]);
      }
    }
  }
};

template <typename T, bool kGrad>
void launch_packs(
    KernelContext& context, const Groups& v, const Room& room, const T* dy, const T* x, T* out) {
  using C = ComputeOf<T>;
  const auto launch_of = [&]<int kCount>(std::integral_constant<int, kCount>) {
    using Packs = GroupNormPacks<T, kCount, kGrad>;
    launch(
        context,
        v.n * ((v.s + Packs::kRows - 1) / Packs::kRows) * (v.c() / kCount),
        Packs{v.s, v.c(), dy, x, out, room.numbers<C>(0), room.numbers<C>(1), room.numbers<C>(2)});
  };
  if (takes_packs(v.c(), kChannelPack<T>, {dy, x, out, room.data})) {
    launch_of(std::integral_constant<int, kChannelPack<T>>());
  } else {
    launch_of(std::integral_constant<int, 1>());
  }
}

template <typename T>
void sum_images(KernelContext& context,
                const Groups& v,
                const Room& room,
                const T* first,
                const T* x,
                const ComputeOf<T>* mean,
                const ComputeOf<T>* inv) {
  const Scratch& scratch = room.scratch;
  launch(context,
         v.n * scratch.parts * scratch.c,
         GroupNormParts<T>{v, scratch, first, x, mean, inv, room.data});
  launch_teams(context, 2 * v.n * scratch.c, scratch.parts, AddParts{room});
}

// ---- operators -------------------------------------------------------------------------------

void group_norm_cuda(KernelContext& context) {
  const Groups v = groups_of(context);
  const double epsilon = context.attributes().get_float("epsilon", 1e-5);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    using C = ComputeOf<T>;
    const T *x = context.input<T>(0), *scale = context.input<T>(1), *bias = context.input<T>(2);
    C *mean = context.output<C>(1), *inv = context.output<C>(2);
    T* y = context.output<T>(0);
    if (group_norm::view_of(context).last) {
      const Room room = room_of(context);
      sum_images<T>(context, v, room, x, nullptr, nullptr, nullptr);
      launch_teams(context,
                   v.n * v.groups,
                   v.channels,
                   GroupNormNumbers<T>{v, room, scale, bias, mean, inv, epsilon});
      launch_packs<T, /*kGrad=*/false>(context, v, room, nullptr, x, y);
    } else {
      launch_teams(context,
                   v.n * v.groups,
                   v.length(),
                   GroupNormRow<T>{v, x, scale, bias, y, mean, inv, static_cast<C>(epsilon)});
    }
  });
}

void group_norm_grad_cuda(KernelContext& context) {
  const Groups v = groups_of(context);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    using C = ComputeOf<T>;
    const T *dy = context.input<T>(0), *x = context.input<T>(1), *scale = context.input<T>(2);
    const C *mean = context.input<C>(3), *inv = context.input<C>(4);
    T *dx = context.output<T>(0), *dscale = context.output<T>(1), *dbias = context.output<T>(2);
    const bool wants_parameters = dscale != nullptr || dbias != nullptr;
    if (group_norm::view_of(context).last) {
      const Room room = room_of(context);
      sum_images<T>(context, v, room, dy, x, mean, inv);
      if (wants_parameters) {
        launch_teams(context, 2 * v.c(), v.n, GroupNormParameterGrad<T>{room, dscale, dbias});
      }
      if (dx != nullptr) {
        launch_teams(context,
                     v.n * v.groups,
                     v.channels,
                     GroupNormGradNumbers<T>{v, room, scale, mean, inv});
        launch_packs<T, /*kGrad=*/true>(context, v, room, dy, x, dx);
      }
      return;
    }
    if (wants_parameters) {
      launch_teams(
          context, v.c(), v.n * v.s, GroupNormGradChannel<T>{v, dy, x, mean, inv, dscale, dbias});
    }
    if (dx != nullptr) {
      launch_teams(
          context, v.n * v.groups, v.length(), GroupNormGradRow<T>{v, dy, x, scale, mean, inv, dx});
    }
  });
}

const RegisterCudaKernel kGroupNorm{"GroupNorm", group_norm_cuda};
const RegisterCudaKernel kGroupNormGrad{"GroupNormGrad", group_norm_grad_cuda};

}  // namespace

}  // namespace trainrt
