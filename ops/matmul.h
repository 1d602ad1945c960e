// The geometry of matrix products (ops/matmul.cc says what they compute), for the kernels of both
// devices.
#pragma once

#include <algorithm>

#include "graph/op_def.h"

namespace trainrt {

// A product as three dims and strides in elements; the leading dims of a and b are given with the
// strides at which they are read (0 where they broadcast).
struct Product {
  Shape batch;
  int64_t m = 0, n = 0, k = 0;
  Shape a_batch_strides, b_batch_strides;
  int64_t a_row = 0, a_column = 0;  // strides of a over m and k
  int64_t b_row = 0, b_column = 0;  // strides of b over k and n
};

inline Shape leading(const Shape& shape) {
  return {shape.begin(), shape.end() - 2};
}

// Strides of the leading dims of `shape`, read when broadcast to `batch`.
inline Shape leading_strides(const Shape& shape, const Shape& batch) {
  Shape strides = broadcast_strides(leading(shape), batch);
  const int64_t matrix = shape[shape.size() - 2] * shape[shape.size() - 1];
  for (int64_t& stride : strides) {
    stride *= matrix;
  }
  return strides;
}

inline Product matmul_product(const Shape& a, const Shape& b, bool trans_a, bool trans_b) {
  Product p;
  const int64_t a0 = a[a.size() - 2], a1 = a[a.size() - 1];
  const int64_t b0 = b[b.size() - 2], b1 = b[b.size() - 1];
  p.m = trans_a ? a1 : a0;
  p.k = trans_a ? a0 : a1;
  p.n = trans_b ? b0 : b1;
  p.a_row = trans_a ? 1 : a1;
  p.a_column = trans_a ? a1 : 1;
  p.b_row = trans_b ? 1 : b1;
  p.b_column = trans_b ? b1 : 1;
  const bool b_is_shared = num_elements(leading(b)) == 1;
  if (b_is_shared && !trans_a) {
    p.m *= num_elements(leading(a));  // rows of all matrices as one matrix
    return p;
  }
  p.batch = broadcast_shapes(leading(a), leading(b));
  p.a_batch_strides = leading_strides(a, p.batch);
  p.b_batch_strides = leading_strides(b, p.batch);
  if (leading(a) == leading(b)) {  // fold equal leading dims into one
    p.batch = {num_elements(p.batch)};
    p.a_batch_strides = {a0 * a1};
    p.b_batch_strides = {b0 * b1};
  }
  return p;
}

inline Product weight_grad_product(const Shape& a, const Shape& dy) {
  Product p;
  p.m = a.back();
  p.n = dy.back();
  p.k = num_elements(a) / std::max<int64_t>(1, p.m);
  p.a_row = 1;
  p.a_column = p.m;
  p.b_row = p.n;
  p.b_column = 1;
  return p;
}

template <typename Context>
Product product_of(const Context& op) {
  const std::string& type = op.node().op_type;
  if (type == "MatMulWeightGrad" || type == "MatMulWeightBiasGrad") {
    return weight_grad_product(op.input_shape(0), op.input_shape(1));
  }
  return matmul_product(op.input_shape(0),
                        op.input_shape(1),
                        op.attributes().get_int("trans_a", 0) != 0,
                        op.attributes().get_int("trans_b", 0) != 0);
}

// Inputs of MatMulAdd.
constexpr int kBias = 2, kTerm = 3;
// Of MatMulReluGrad.
constexpr int kReluResult = 2;

// Element (i, j) of the product of one matrix of a and one of b.
template <typename T>
Accumulator<T> product_element(const Product& p, const T* a, const T* b, int64_t i, int64_t j) {
  Accumulator<T> sum = 0;
  for (int64_t k = 0; k < p.k; ++k) {
    sum += static_cast<Accumulator<T>>(a[i * p.a_row + k * p.a_column]) *
           static_cast<Accumulator<T>>(b[k * p.b_row + j * p.b_column]);
  }
  return sum;
}

// Calls fn(a offset, b offset, y offset) for each matrix of the batch.
template <typename Fn>
void for_each_matrix(const Product& p, Fn&& fn) {
  const int64_t count = num_elements(p.batch);
  Shape index(p.batch.size(), 0);
  int64_t a = 0, b = 0;
  for (int64_t i = 0; i < count; ++i) {
    fn(a, b, i * p.m * p.n);
    for (size_t d = p.batch.size(); d-- > 0;) {
      a += p.a_batch_strides[d];
      b += p.b_batch_strides[d];
      if (++index[d] < p.batch[d]) {
        break;
      }
      a -= p.a_batch_strides[d] * p.batch[d];
      b -= p.b_batch_strides[d] * p.batch[d];
      index[d] = 0;
    }
  }
}

// Room that cuBLASLt may use. NVIDIA recommends 32 MiB from Hopper on, 4 MiB before; products of
// little work need none. The extra bytes let a kernel align it.
inline constexpr int64_t kCublasAlignment = 256;
inline int64_t cublas_workspace(const Product& p, const DeviceSpec& spec) {
  constexpr double kLittleWork = 1 << 22;  // multiplications
  const double work = static_cast<double>(p.m) * static_cast<double>(p.n) *
                      static_cast<double>(p.k) * static_cast<double>(num_elements(p.batch));
  if (work <= kLittleWork) {
    return 0;
  }
  const int64_t wanted = spec.isa == "sm_80" || spec.isa == "sm_86" || spec.isa == "sm_89"
                             ? int64_t{4} << 20
                             : int64_t{32} << 20;
  return std::min(wanted, spec.workspace_cap) + kCublasAlignment;
}

// One bit for each element of a product, rows padded to the multiple that cuBLASLt wants.
inline constexpr int64_t kMaskRowBits = 128;
inline int64_t sign_mask_row_bits(const Product& p) {
  return (p.n + kMaskRowBits - 1) / kMaskRowBits * kMaskRowBits;
}
inline int64_t sign_mask_bytes(const Product& p) {
  return num_elements(p.batch) * p.m * sign_mask_row_bits(p) / 8;
}

}  // namespace trainrt
