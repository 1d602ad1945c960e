// CUDA kernels of LayerNormalization, RMSNormalization and their gradients (ops/layer_norm.cc has
// the formulas). A team of lanes takes a row; nothing is added by atomics. Means and variances are
// summed in float32 around the mean, in double for float64.
#include <algorithm>
#include <cmath>

#include "ops/elementwise.cuh"
#include "ops/launch.cuh"

namespace trainrt {

namespace {

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
  T* y;
  C *mean_out, *inv_out;
  int64_t n;
  bool centered;
  C epsilon;

  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t row) const {
    const T* from = x + row * n;
    T* to = y + row * n;
    const NormRow& self = *this;
    const C count = static_cast<C>(n > 0 ? n : 1);  // of no elements mean and variance are 0
    C mean = 0;
    if (centered) {
      mean = team_sum<C>(team, n, [from](int64_t j) { return to_compute<C>(from[j]); }) / count;
    }
    const C square = team_sum<C>(team, n, [from, mean](int64_t j) {
      const C d = to_compute<C>(from[j]) - mean;
      return d * d;
    });
    const C inv = C(1) / std::sqrt(square / count + epsilon);
    team.for_each(n, [&self, from, to, mean, inv](int64_t j) {
      const C h = (to_compute<C>(from[j]) - mean) * inv * to_compute<C>(self.scale[j]);
      to[j] = to_storage<T>(self.bias == nullptr ? h : h + to_compute<C>(self.bias[j]));
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

template <bool kCentered>
void norm_cuda(KernelContext& context) {
  const Rows rows = rows_of(context, 0);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    using C = ComputeOf<T>;
    launch_teams(context,
                 rows.rows,
                 rows.length,
                 NormRow<T>{context.input<T>(0),
                            context.input<T>(1),
                            kCentered ? context.input<T>(2) : nullptr,
                            context.output<T>(0),
                            kCentered ? context.output<C>(1) : nullptr,
                            context.output<C>(kCentered ? 2 : 1),
                            rows.length,
                            kCentered,
                            static_cast<C>(context.attributes().get_float("epsilon", 1e-5))});
  });
}

// dx may overwrite dy: a lane writes what it alone has read, after both sums.
template <typename T>
struct NormGradRow {
  using C = ComputeOf<T>;
  const T *dy, *x, *scale;
  const C *mean, *inv;
  T* dx;
  int64_t n;

  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t row) const {
    const C m = mean == nullptr ? C(0) : mean[row], i = inv[row];
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
  const T *dy, *x;
  const C *mean, *inv;
  C* sums;
  int64_t rows, n, segment_rows;

  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t segment = index / n, j = index % n, first = segment * segment_rows;
    const int64_t end = first + segment_rows < rows ? first + segment_rows : rows;
    C dscale = 0, dbias = 0;
    for (int64_t row = first; row < end; ++row) {
      const C m = mean == nullptr ? C(0) : mean[row];
      const C g = to_compute<C>(dy[row * n + j]);
      dscale += g * ((to_compute<C>(x[row * n + j]) - m) * inv[row]);
      dbias += g;
    }
    sums[2 * segment * n + j] = dscale;
    sums[(2 * segment + 1) * n + j] = dbias;
  }
};

// A team per sum, dscale's and then dbias': a thread alone would wait for hundreds of loads.
// Neighbouring teams read the same words.
template <typename T>
struct NormGradMerge {
  using C = ComputeOf<T>;
  const C* sums;
  T *dscale, *dbias;
  int64_t segments, n;

  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t i) const {
    T* out = i < n ? dscale : dbias;
    if (out == nullptr) {
      return;
    }
    const C* from = sums + i;
    const int64_t step = 2 * n;
    const C total = team_sum<C>(team, segments, [from, step](int64_t k) { return from[k * step]; });
    if (team.leads()) {
      out[i < n ? i : i - n] = to_storage<T>(total);
    }
  }
};

template <typename T>
void norm_column_sums(KernelContext& context,
                      const Rows& rows,
                      const ComputeOf<T>* mean,
                      const ComputeOf<T>* inv,
                      T* dbias) {
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
  launch_teams(context,
               2 * rows.length,
               segments,
               NormGradMerge<T>{sums, context.output<T>(1), dbias, segments, rows.length});
}

template <bool kCentered>
void norm_grad_cuda(KernelContext& context) {
  const Rows rows = rows_of(context, 1);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    using C = ComputeOf<T>;
    const C* mean = kCentered ? context.input<C>(3) : nullptr;
    const C* inv = context.input<C>(kCentered ? 4 : 3);
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

const RegisterCudaKernel kLayerNorm{"LayerNormalization", norm_cuda<true>};
const RegisterCudaKernel kLayerNormGrad{"LayerNormGrad", norm_grad_cuda<true>};
const RegisterCudaKernel kRmsNorm{"RMSNormalization", norm_cuda<false>};
const RegisterCudaKernel kRmsNormGrad{"RMSNormGrad", norm_grad_cuda<false>};

}  // namespace

}  // namespace trainrt
