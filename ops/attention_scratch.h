// How the CUDA kernels of FusedAttention divide their workspace: a function of shapes and cap, so
// that a plan knows it.
#pragma once

#include <algorithm>

#include "ops/attention.h"
#include "ops/matmul.h"

namespace trainrt::attention {

// Scores of so many heads of one sample at a time as the cap allows, in the type of computation;
// beside them, for 16-bit floats, what the next products read. One after the other, then the sums
// of the mask's gradient, then cuBLASLt's room.
struct DeviceScratch {
  int64_t kv_heads = 1;    // at a time, each with the query heads that share it
  int64_t wide = 0;        // bytes of one array of scores in the type of computation
  int64_t narrow = 0;      // the same in the tensors' type; 0 where the two are one
  int64_t num_arrays = 1;  // of either: scores; backward also their gradients
  int64_t mask = 0;        // bytes of the sums of the mask's gradient
  int64_t cublas = 0;

  // `grad_mask`: the shape of the mask whose gradient is wanted, empty of elements for none; null
  // for the forward operator.
  DeviceScratch(const Problem& p, DType dtype, const Shape* grad_mask, const DeviceSpec& spec) {
    const bool half = dtype_bytes(dtype) == 2;
    const int64_t wide_bytes = half ? 4 : dtype_bytes(dtype);
    const int64_t matrices = p.group() * p.sq * p.sk;  // elements per head of k and v
    num_arrays = grad_mask != nullptr ? 2 : 1;
    const int64_t per_head = num_arrays * matrices * (wide_bytes + (half ? 2 : 0));
    kv_heads = std::clamp<int64_t>(
        spec.workspace_cap / std::max<int64_t>(1, per_head), 1, std::max<int64_t>(1, p.kv_heads));
    const auto round_up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    wide = round_up(kv_heads * matrices * wide_bytes);
    narrow = half ? round_up(kv_heads * matrices * 2) : 0;
    mask = grad_mask != nullptr ? round_up(num_elements(*grad_mask) * wide_bytes) : 0;
    Product product;
    product.batch = {kv_heads};
    product.m = p.sq;
    product.n = p.sk;
    product.k = std::max(p.d, p.e);
    cublas = cublas_workspace(product, spec);
  }
  int64_t arrays() const { return num_arrays * (wide + narrow); }
  int64_t total() const { return arrays() + mask + cublas; }
};

}  // namespace trainrt::attention
