// What kernels over rows (softmax, normalizations) share: types and cuts.
//
// Tensors of float32, float64, float16 and bfloat16 are read as they lie and computed in
// Compute<T>: double for float64, float otherwise. Reference kernels compute in double whatever T.
#pragma once

#include <algorithm>
#include <cstdint>

#include "graph/dtype.h"
#include "graph/kernel.h"
#include "graph/op_def.h"
#include "ops/vectors.h"

namespace trainrt {

// Calls fn(T{}) with float, double, Float16 or BFloat16.
template <typename Fn>
decltype(auto) dispatch_real(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(float{});
    case DType::kFloat64:
      return fn(double{});
    case DType::kFloat16:
      return fn(Float16{});
    case DType::kBFloat16:
      return fn(BFloat16{});
    default:
      TRAINRT_FAIL(kUnsupported, "kernel wants floating-point tensors, got ", dtype_name(dtype));
  }
}

template <typename T>
constexpr bool is_half = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

template <typename T>
using Compute = std::conditional_t<std::is_same_v<T, double>, double, float>;

// In the type of a sum: what statistics of 16-bit tensors are kept in, here Compute<T>.
inline DType statistic_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

template <typename C, typename T>
inline C load(T value) {
  if constexpr (is_half<T>) {
    return static_cast<C>(static_cast<float>(value));
  } else {
    return static_cast<C>(value);
  }
}

template <typename T, typename C>
inline T store(C value) {
  if constexpr (is_half<T>) {
    return T(static_cast<float>(value));
  } else {
    return static_cast<T>(value);
  }
}

// A tensor seen along one axis: [outer, length, inner].
struct AxisView {
  int64_t outer = 1, length = 1, inner = 1;
};

inline AxisView axis_view(const Shape& shape, int axis) {
  return {dims_product(shape, 0, axis),
          shape[static_cast<size_t>(axis)],
          dims_product(shape, axis + 1, static_cast<int>(shape.size()))};
}

// Rows of `length` elements per block of work: enough to outweigh starting the block, a function of
// the shape alone.
inline int64_t row_grain(int64_t length) {
  constexpr int64_t kElements = 16384;
  return std::max<int64_t>(1, kElements / std::max<int64_t>(1, length));
}

// Sum over i < n of term(i), taken in C in independent lanes (which makes the loop vector code), in
// double from block to block.
template <typename C, typename Term>
double lane_sum(int64_t n, Term&& term) {
  constexpr int64_t kLanes = 2 * kVector<C>, kBlock = 64 * kLanes;
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    Vector<C> sums[2] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      C terms[kLanes];
      for (int64_t l = 0; l < kLanes; ++l) {
        terms[l] = term(i + l);
      }
      sums[0] += load_vector(terms);
      sums[1] += load_vector(terms + kVector<C>);
    }
    C rest = 0;
    for (; i < end; ++i) {
      rest += term(i);
    }
    total += static_cast<double>(sum_of_lanes<C>(sums[0] + sums[1]) + rest);
  }
  return total;
}

inline void require_real(const OpContext& op) {
  TRAINRT_REQUIRE(is_floating(op.input_dtype(0)),
                  kInvalidModel,
                  op.node().op_type,
                  " wants floating-point tensors, got ",
                  dtype_name(op.input_dtype(0)));
}

// Inputs `first` and on of a gradient: statistics that the forward operator saved.
inline void require_statistics(const OpContext& op, int first, const TensorType& wanted) {
  for (int i = first; i < op.num_inputs(); ++i) {
    TRAINRT_REQUIRE(op.input_type(i) == wanted,
                    kInvalidModel,
                    op.node().op_type,
                    ": statistics (input ",
                    i,
                    ") are ",
                    dtype_name(op.input_dtype(i)),
                    shape_string(op.input_shape(i)),
                    ", wanted ",
                    dtype_name(wanted.dtype),
                    shape_string(wanted.shape));
  }
}

// {y, dy} of equal types -> that type: gradient operators of one tensor.
inline TensorTypes infer_same(const OpContext& op) {
  require_real(op);
  for (int i = 1; i < op.num_inputs(); ++i) {
    TRAINRT_REQUIRE(!op.has_input(i) || op.input_type(i) == op.input_type(0),
                    kInvalidModel,
                    op.node().op_type,
                    ": input ",
                    i,
                    " is ",
                    dtype_name(op.input_dtype(i)),
                    shape_string(op.input_shape(i)),
                    ", wanted ",
                    dtype_name(op.input_dtype(0)),
                    shape_string(op.input_shape(0)));
  }
  return {op.input_type(0)};
}

}  // namespace trainrt
