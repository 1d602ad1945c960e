// CUDA kernels of the reductions (ops/reduce.cuh), of the gradient of ReduceProd, of ArgMax, ArgMin
// and TopK, and of CumSum.
#include "ops/elementwise.cuh"
#include "ops/reduce.cuh"
#include "ops/reduce_rules.h"

namespace trainrt {

namespace {

using elementwise::StoredFloat;
using elementwise::StoredInteger;

template <typename R, typename S, typename A>
void reduce_as(KernelContext& context) {
  const ReductionWalk walk =
      reduction_walk(context.input_shape(0), context.attributes().get_ints("axes"));
  const double count = static_cast<double>(context.attributes().get_int("count", walk.count));
  launch_reduction<R, S, A>(context,
                            walk,
                            context.input_dtype(0),
                            context.raw_input(0),
                            context.raw_output(0),
                            context.workspace(),
                            count);
}

template <typename R>
void reduce_cuda(KernelContext& context) {
  switch (context.input_dtype(0)) {
    case DType::kFloat64:
      return reduce_as<R, StoredFloat<double>, typename R::template Accumulator<double>>(context);
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16:
      return reduce_as<R, StoredFloat<float>, typename R::template Accumulator<float>>(context);
    case DType::kUInt8:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
      return reduce_as<R, StoredInteger<uint64_t>, typename R::template Accumulator<uint64_t>>(
          context);
    default:
      return reduce_as<R, StoredInteger<int64_t>, typename R::template Accumulator<int64_t>>(
          context);
  }
}

// dx_i = dy times the product of the others: prefix products up, suffix products down. One thread
// per row.
template <typename T>
struct ProdGradRow {
  const T *x, *dy;
  T* dx;
  int64_t n;
  TRAINRT_HOST_DEVICE void operator()(int64_t row) const {
    using C = ComputeOf<T>;
    // Prefixes are not kept: each is made again from the row, whose length is small as a rule.
    for (int64_t i = 0; i < n; ++i) {
      C product = to_compute<C>(dy[row]);
      for (int64_t j = 0; j < n; ++j) {
        product *= j == i ? C(1) : to_compute<C>(x[row * n + j]);
      }
      dx[row * n + i] = to_storage<T>(product);
    }
  }
};

void prod_grad_cuda(KernelContext& context) {
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           context.input_shape(0)[0],
           ProdGradRow<T>{context.input<T>(0),
                          context.input<T>(1),
                          context.output<T>(0),
                          context.input_shape(0)[1]});
  });
}

// ---- positions along an axis -----------------------------------------------------------------

// A tensor seen as [outer, n, inner] around an axis.
struct Lines {
  int64_t outer, n, inner;
  TRAINRT_HOST_DEVICE int64_t begin(int64_t line, int64_t size) const {
    return line / inner * size * inner + line % inner;
  }
};

Lines lines_of(const KernelContext& context, int64_t fallback) {
  const Shape& shape = context.input_shape(0);
  const int ndim = static_cast<int>(shape.size());
  const int axis = normalize_axis(context.attributes().get_int("axis", fallback), ndim);
  return {dims_product(shape, 0, axis),
          shape[static_cast<size_t>(axis)],
          dims_product(shape, axis + 1, ndim)};
}

// NaN counts as larger than everything.
template <typename C>
TRAINRT_HOST_DEVICE bool greater(C a, C b) {
  return a > b || (a != a && b == b);
}

struct Candidate {
  int64_t position;  // -1: none
};

template <bool kMax, typename S>
struct ArgExtremum {
  Lines lines;
  const void* in;
  DType dtype;
  bool last;
  int64_t* out;

  // Whether element a of the line is to be preferred to element b.
  TRAINRT_HOST_DEVICE bool prefers(int64_t base, int64_t a, int64_t b) const {
    const auto u = S::load(in, dtype, base + a * lines.inner);
    const auto v = S::load(in, dtype, base + b * lines.inner);
    const bool better = kMax ? greater(u, v) : greater(v, u);
    const bool worse = kMax ? greater(v, u) : greater(u, v);
    return better || (!worse && (last ? a > b : a < b));
  }

  template <typename T>
  TRAINRT_HOST_DEVICE void operator()(const T& team, int64_t line) const {
    const int64_t base = lines.begin(line, lines.n);
    const ArgExtremum& self = *this;
    const Candidate best = team.reduce(
        lines.n,
        Candidate{-1},
        [](int64_t i) { return Candidate{i}; },
        [&self, base](const Candidate& a, const Candidate& b) {
          return a.position < 0   ? b
                 : b.position < 0 ? a
                                  : (self.prefers(base, b.position, a.position) ? b : a);
        });
    if (team.leads()) {
      out[lines.begin(line, 1)] = best.position;
    }
  }
};

template <typename Fn>
void dispatch_compute(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat64:
      return fn(StoredFloat<double>{});
    case DType::kFloat32:
    case DType::kFloat16:
    case DType::kBFloat16:
      return fn(StoredFloat<float>{});
    case DType::kUInt8:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
      return fn(StoredInteger<uint64_t>{});
    default:
      return fn(StoredInteger<int64_t>{});
  }
}

template <bool kMax>
void arg_cuda(KernelContext& context) {
  const Lines lines = lines_of(context, 0);
  dispatch_compute(context.input_dtype(0), [&](auto stored) {
    launch_teams(context,
                 lines.outer * lines.inner,
                 lines.n,
                 ArgExtremum<kMax, decltype(stored)>{
                     lines,
                     context.raw_input(0),
                     context.input_dtype(0),
                     context.attributes().get_int("select_last_index", 0) != 0,
                     context.output<int64_t>(0)});
  });
}

// The k best one after the other: each is the best of those that come after the previous one.
template <typename S>
struct TopElements {
  Lines lines;
  const void* in;
  void* values;
  int64_t* positions;
  DType dtype;
  int64_t k;
  bool largest;

  TRAINRT_HOST_DEVICE bool before(int64_t base, int64_t a, int64_t b) const {
    const auto u = S::load(in, dtype, base + a * lines.inner);
    const auto v = S::load(in, dtype, base + b * lines.inner);
    const bool first = largest ? greater(u, v) : greater(v, u);
    const bool second = largest ? greater(v, u) : greater(u, v);
    return first || (!second && a < b);
  }

  template <typename T>
  TRAINRT_HOST_DEVICE void operator()(const T& team, int64_t line) const {
    const int64_t base = lines.begin(line, lines.n), to = lines.begin(line, k);
    const TopElements& self = *this;
    int64_t previous = -1;
    for (int64_t j = 0; j < k; ++j) {
      const Candidate best = team.reduce(
          lines.n,
          Candidate{-1},
          [&self, base, previous](int64_t i) {
            return Candidate{previous < 0 || self.before(base, previous, i) ? i : -1};
          },
          [&self, base](const Candidate& a, const Candidate& b) {
            return a.position < 0   ? b
                   : b.position < 0 ? a
                                    : (self.before(base, b.position, a.position) ? b : a);
          });
      previous = best.position;
      if (team.leads()) {
        S::store(
            values, dtype, to + j * lines.inner, S::load(in, dtype, base + previous * lines.inner));
        if (positions != nullptr) {
          positions[to + j * lines.inner] = previous;
        }
      }
    }
  }
};

void top_k_cuda(KernelContext& context) {
  const Lines lines = lines_of(context, -1);
  dispatch_compute(context.input_dtype(0), [&](auto stored) {
    launch_teams(context,
                 lines.outer * lines.inner,
                 lines.n,
                 TopElements<decltype(stored)>{lines,
                                               context.raw_input(0),
                                               context.raw_output(0),
                                               context.output<int64_t>(1),
                                               context.input_dtype(0),
                                               context.attributes().get_int("k"),
                                               context.attributes().get_int("largest", 1) != 0});
  });
}

// One thread per line.
template <typename S>
struct CumulativeSum {
  Lines lines;
  const void* in;
  void* out;
  DType dtype;
  bool exclusive, reverse;
  TRAINRT_HOST_DEVICE void operator()(int64_t line) const {
    const int64_t base = lines.begin(line, lines.n);
    typename S::C sum{};
    for (int64_t i = 0; i < lines.n; ++i) {
      const int64_t at = base + (reverse ? lines.n - 1 - i : i) * lines.inner;
      const typename S::C before = sum;
      sum += S::load(in, dtype, at);
      S::store(out, dtype, at, exclusive ? before : sum);
    }
  }
};

void cum_sum_cuda(KernelContext& context) {
  const Lines lines = lines_of(context, -1);
  dispatch_compute(context.input_dtype(0), [&](auto stored) {
    launch(context,
           lines.outer * lines.inner,
           CumulativeSum<decltype(stored)>{lines,
                                           context.raw_input(0),
                                           context.raw_output(0),
                                           context.input_dtype(0),
                                           context.attributes().get_int("exclusive", 0) != 0,
                                           context.attributes().get_int("reverse", 0) != 0});
  });
}

const RegisterCudaKernel kSum{"ReduceSum", reduce_cuda<reduce::Sum>};
const RegisterCudaKernel kMean{"ReduceMean", reduce_cuda<reduce::Mean>};
const RegisterCudaKernel kL1{"ReduceL1", reduce_cuda<reduce::L1>};
const RegisterCudaKernel kL2{"ReduceL2", reduce_cuda<reduce::L2>};
const RegisterCudaKernel kSumSquare{"ReduceSumSquare", reduce_cuda<reduce::SumSquare>};
const RegisterCudaKernel kMax{"ReduceMax", reduce_cuda<reduce::Max>};
const RegisterCudaKernel kMin{"ReduceMin", reduce_cuda<reduce::Min>};
const RegisterCudaKernel kProd{"ReduceProd", reduce_cuda<reduce::Prod>};
const RegisterCudaKernel kLogSumExp{"ReduceLogSumExp", reduce_cuda<reduce::LogSumExp>};
const RegisterCudaKernel kProdGrad{"ReduceProdGrad", prod_grad_cuda};
const RegisterCudaKernel kArgMax{"ArgMax", arg_cuda<true>};
const RegisterCudaKernel kArgMin{"ArgMin", arg_cuda<false>};
const RegisterCudaKernel kTopK{"TopK", top_k_cuda};
const RegisterCudaKernel kCumSum{"CumSum", cum_sum_cuda};

}  // namespace

}  // namespace trainrt
