// Reductions from functors. A reducer says how one element, widened to double or a 64-bit integer,
// joins the accumulator:
//
//   struct Sum {
//     template <typename X> using Accumulator = X;  // or a struct of its own, at most 16 bytes
//     template <typename A> static A init();
//     template <typename A> static A step(A sum, A x);
//     template <typename A> static A merge(A a, A b);
//     template <typename A> static A finish(A sum, double count);
//   };
//
// A step may be the identity in `merge` only for the init value. The order of additions depends on
// the shape alone. How the dims are walked is ordinary code in reduce.cc. Two things a reducer may
// declare make float loops wide: `kExact` (it picks an element, the one that `wins`: nothing is
// rounded), and `kPlainSum` (the sum of a few rows may be taken in the element's type first).
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <type_traits>

#include "graph/kernel.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/convert.h"
#include "ops/rows.h"
#include "ops/vectors.h"

namespace trainrt {

namespace reduce {

constexpr int64_t kLanes = 16;     // independent accumulators along a contiguous run
constexpr int64_t kColumns = 128;  // accumulators of a block of columns
constexpr int64_t kRows = 16;      // joined to them at a time

constexpr int64_t kMaxAccumulatorBytes = 16;

// The type-erased parts of a reducer.
struct Loops {
  int64_t element_bytes;
  int64_t accumulator_bytes;
  void (*init)(void* accumulators, int64_t n);
  // accumulators[0] joined with n elements `stride` apart.
  void (*row)(void* accumulators, const void* elements, int64_t stride, int64_t n);
  // accumulators[j] joined with rows[i][j] for i < count <= kRows, j < n <= kColumns.
  void (*columns)(void* accumulators, const void* const* rows, int64_t count, int64_t n);
  void (*merge)(void* accumulators, const void* others, int64_t n);
  void (*finish)(const void* accumulators, void* out, int64_t n, double count);
};

// The plain walk (one output after the other, one element after the other), and the fast one.
void run_reference(KernelContext& context, const Loops& loops);
void run_fast(KernelContext& context, const Loops& loops);

template <typename T>
using Wide = std::conditional_t<std::is_integral_v<T>,
                                std::conditional_t<std::is_unsigned_v<T>, uint64_t, int64_t>,
                                double>;

template <typename T>
Wide<T> widen(T value) {
  if constexpr (is_half<T>) {
    return static_cast<Wide<T>>(static_cast<float>(value));
  } else {
    return static_cast<Wide<T>>(value);
  }
}

template <typename R>
concept Exact = R::kExact;
template <typename R>
concept PlainSum = R::kPlainSum;

// What elements of T are widened to for reducer R.
template <typename R, typename T>
using Element =
    std::conditional_t<Exact<R> && (std::is_same_v<T, float> || is_half<T>), float, Wide<T>>;

template <typename R, typename T>
Element<R, T> to_element(T value) {
  return static_cast<Element<R, T>>(widen(value));
}

// accumulators[j] joined with rows[i][j] for i < count, j < n.
template <typename R, typename T>
void column_loop(void* accumulators, const void* const* rows, int64_t count, int64_t n) {
  using A = typename R::template Accumulator<Element<R, T>>;
  A* a = static_cast<A*>(accumulators);
  if constexpr (PlainSum<R> && std::is_same_v<T, float>) {
    int64_t j = 0;
    for (; j + 2 * kVector<float> <= n; j += 2 * kVector<float>) {
      Vector<float> sums[2] = {};
      for (int64_t i = 0; i < count; ++i) {
        const float* x = static_cast<const float*>(rows[i]) + j;
        sums[0] += load_vector(x);
        sums[1] += load_vector(x + kVector<float>);
      }
      float lanes[2 * kVector<float>];
      std::memcpy(lanes, sums, sizeof(lanes));
#pragma omp simd
      for (int64_t l = 0; l < 2 * kVector<float>; ++l) {
        a[j + l] += static_cast<A>(lanes[l]);
      }
    }
    for (; j < n; ++j) {
      float sum = 0;
      for (int64_t i = 0; i < count; ++i) {
        sum += static_cast<const float*>(rows[i])[j];
      }
      a[j] += static_cast<A>(sum);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      const auto join = [a, n](const auto* x) {
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) {
          a[j] = R::step(a[j], to_element<R>(x[j]));
        }
      };
      if constexpr (Exact<R> && is_half<T>) {
        float x[kColumns];
        convert_elements(DTypeOf<T>::value, rows[i], DType::kFloat32, x, n);
        join(x);
      } else {
        join(static_cast<const T*>(rows[i]));
      }
    }
  }
}

template <typename R, typename T>
void row_loop(void* accumulators, const void* elements, int64_t stride, int64_t n) {
  using A = typename R::template Accumulator<Element<R, T>>;
  const T* x = static_cast<const T*>(elements);
  if constexpr (Exact<R> && is_half<T>) {
    if (stride == 1) {  // as float32, block by block
      constexpr int64_t kBlock = 256;
      for (int64_t begin = 0; begin < n; begin += kBlock) {
        const int64_t count = std::min(kBlock, n - begin);
        float block[kBlock];
        convert_elements(DTypeOf<T>::value, x + begin, DType::kFloat32, block, count);
        row_loop<R, float>(accumulators, block, 1, count);
      }
      return;
    }
  }
  A result = *static_cast<A*>(accumulators);
  int64_t i = 0;
  if constexpr (Exact<R> && std::is_same_v<T, float>) {
    if (stride == 1 && n >= kVector<float>) {
      const auto join = [](Vector<float> a, Vector<float> b) {  // NaN wins and stays
        return R::wins(a, b) | (a != a) ? a : b;
      };
      Vector<float> best = load_vector(x);
      for (i = kVector<float>; i + kVector<float> <= n; i += kVector<float>) {
        best = join(load_vector(x + i), best);
      }
      result = R::step(result, fold_lanes<float>(best, join));
    }
  } else if (stride == 1 && n >= kLanes) {
    A lanes[kLanes];
    for (A& lane : lanes) {
      lane = R::template init<A>();
    }
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
      for (int64_t j = 0; j < kLanes; ++j) {
        lanes[j] = R::step(lanes[j], to_element<R>(x[i + j]));
      }
    }
    for (int64_t width = kLanes / 2; width > 0; width /= 2) {
      for (int64_t j = 0; j < width; ++j) {
        lanes[j] = R::merge(lanes[j], lanes[j + width]);
      }
    }
    result = R::merge(result, lanes[0]);
  }
  for (; i < n; ++i) {
    result = R::step(result, to_element<R>(x[i * stride]));
  }
  *static_cast<A*>(accumulators) = result;
}

template <typename R, typename T>
Loops loops_of() {
  using A = typename R::template Accumulator<Element<R, T>>;
  Loops loops;
  static_assert(sizeof(A) <= kMaxAccumulatorBytes);
  loops.element_bytes = sizeof(T);
  loops.accumulator_bytes = sizeof(A);
  loops.init = [](void* accumulators, int64_t n) {
    std::fill_n(static_cast<A*>(accumulators), n, R::template init<A>());
  };
  loops.row = row_loop<R, T>;
  loops.columns = column_loop<R, T>;
  loops.merge = [](void* accumulators, const void* others, int64_t n) {
    A* a = static_cast<A*>(accumulators);
    const A* b = static_cast<const A*>(others);
    for (int64_t j = 0; j < n; ++j) {
      a[j] = R::merge(a[j], b[j]);
    }
  };
  loops.finish = [](const void* accumulators, void* out, int64_t n, double count) {
    const A* a = static_cast<const A*>(accumulators);
    T* y = static_cast<T*>(out);
    for (int64_t j = 0; j < n; ++j) {
      const auto result = R::finish(a[j], count);
      if constexpr (is_half<T>) {
        y[j] = T(static_cast<float>(result));
      } else {
        y[j] = static_cast<T>(result);
      }
    }
  };
  return loops;
}

template <typename R>
Loops select_loops(DType dtype) {
  Loops loops;
  dispatch_all(dtype, [&loops](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_same_v<T, bool>) {
      TRAINRT_FAIL(kUnsupported, "reduction of bool");
    } else {
      loops = loops_of<R, T>();
    }
  });
  return loops;
}

// Types, cost, workspace, upgrade and sharding of a reduction with attributes `axes` and
// `keepdims`. Reduced dims are reduction factors of `kind`, or whole.
OpDef form(std::string name, bool sharded, ReductionKind kind);

// The axes of an ONNX reduction, sorted: an attribute, from opset 18 (ReduceSum: 13) an input. None
// given: all, or, with noop_with_empty_axes, none.
std::vector<int64_t> reduced_axes(UpgradeContext& context);

// One float32 example per way of laying out the reduced dims.
std::vector<OpExample> examples(double low, double high);

// A value of the reduced shape with its reduced dims kept as 1, ready to broadcast against input 0.
ValueId keep_dims(GradientBuilder& g, ValueId reduced);

}  // namespace reduce

template <typename R>
OpDef reduce_op(std::string name, bool sharded = false, ReductionKind kind = ReductionKind::kSum) {
  OpDef op = reduce::form(std::move(name), sharded, kind);
  op.reference_kernel = [](KernelContext& context) {
    reduce::run_reference(context, reduce::select_loops<R>(context.input_dtype(0)));
  };
  op.cpu_kernel = [](KernelContext& context) {
    reduce::run_fast(context, reduce::select_loops<R>(context.input_dtype(0)));
  };
  return op;
}

}  // namespace trainrt
