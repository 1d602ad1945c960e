// What the CUDA kernels of FusedAttention choose by shapes and cap alone, so that a plan knows it:
// whether cuDNN's fused engines are asked, and how the workspace is divided.
#pragma once

#include <algorithm>
#include <optional>

#include "ops/attention.h"
#include "ops/matmul.h"

namespace trainrt::attention {

// Scores of so many samples, or heads of one sample, at a time as the cap allows, in the type of
// computation; beside them, for 16-bit floats, what the next products read. One after the other,
// then cuBLASLt's room.
struct DeviceScratch {
  int64_t samples = 1;     // at a time; more than one only where all heads are
  int64_t kv_heads = 1;    // at a time, each with the query heads that share it
  int64_t wide = 0;        // bytes of one array of scores in the type of computation
  int64_t narrow = 0;      // the same in the tensors' type; 0 where the two are one
  int64_t num_arrays = 1;  // of either: scores; backward also their gradients
  int64_t cublas = 0;

  DeviceScratch(const Problem& p, DType dtype, bool backward, const DeviceSpec& spec) {
    const bool half = dtype_bytes(dtype) == 2;
    const int64_t wide_bytes = half ? 4 : dtype_bytes(dtype);
    // Elements per head of k and v.
    const int64_t matrices = p.kv_heads == 0 ? 0 : p.group() * p.sq * p.sk;
    num_arrays = backward ? 2 : 1;
    const int64_t per_head = num_arrays * matrices * (wide_bytes + (half ? 2 : 0));
    kv_heads = std::clamp<int64_t>(
        spec.workspace_cap / std::max<int64_t>(1, per_head), 1, std::max<int64_t>(1, p.kv_heads));
    // Samples that are small; what stays in the cache of a large GPU keeps it busy, too.
    constexpr int64_t kCachedBytes = int64_t{32} << 20;
    const int64_t per_sample = std::max<int64_t>(1, per_head * p.kv_heads);
    samples = std::clamp<int64_t>(std::min(spec.workspace_cap, kCachedBytes) / per_sample,
                                  1,
                                  std::max<int64_t>(1, p.samples));
    const auto round_up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    wide = round_up(samples * kv_heads * matrices * wide_bytes);
    narrow = half ? round_up(samples * kv_heads * matrices * 2) : 0;
    Product product;
    product.batch = {samples * kv_heads};
    product.m = p.sq;
    product.n = p.sk;
    product.k = std::max(p.d, p.e);
    cublas = cublas_workspace(product, spec);
  }
  int64_t arrays() const { return num_arrays * (wide + narrow); }
  int64_t total() const { return arrays() + cublas; }
};

// Why cuDNN's fused engines are not asked for a node; null: they are. They take 16-bit floats and
// heads of a multiple of 8 up to 128 elements; dropout's draws are ours, not cuDNN's.
//
// Hopper's engine for gradients takes 128 keys at a time but looks in units of 64 whether some are
// past the end. Those that are get a score of 0 and a probability of exp(0 - lse), which is
// infinite where scores are below -88, and dq NaN (cudnn-frontend pull request 628); with a single
// query dk and dv are (cudnn-frontend issue 1072, up to 9.26). Keys past the end are hidden where
// each query sees only what is before it.
inline const char* why_not_fused(const OpContext& op, const Problem& p, const DeviceSpec& spec) {
  const auto odd = [](int64_t width) { return width % 8 != 0 || width > 128 || width == 0; };
  const bool grad = op.node().op_type == "FusedAttentionGrad";
  const bool hides_the_end = p.causal && p.sq <= p.sk;
  const bool nan = spec.isa == "sm_90" && !hides_the_end && (p.sk % 128 == 64 || p.sq == 1);
  return dtype_bytes(op.input_dtype(0)) != 2 ? "elements of more than 16 bits"
         : p.has_mask                        ? "a mask other than the causal one"
         : p.ratio > 0                       ? "dropout"
         : odd(p.d) || odd(p.e)              ? "heads that are no multiple of 8 up to 128 wide"
         : p.sk < 2 || p.samples * p.sq == 0 ? "fewer than two keys"
         : grad && op.has_input(7)           ? "a gradient of the rows' sums"
         : grad && !(op.has_output(0) && op.has_output(1) && op.has_output(2))
             ? "operands without a gradient"
         : grad && nan ? "gradients that Hopper's engine gets wrong: of a single query, or of a "
                         "number of keys that is 64 more than a multiple of 128"
                       : nullptr;
}

// Samples at a time, and what the gradient keeps for them: the sums of y dy, dq as it is added up,
// and the engine's own room. The bytes are what cuDNN 9.19's engines ask for.
struct FusedScratch {
  int64_t samples = 1;
  int64_t row_sums = 0, dq_sums = 0;  // bytes
  int64_t engine = 0;

  FusedScratch(const Problem& p, bool backward, const DeviceSpec& spec) : samples(p.samples) {
    constexpr int64_t kConstant = 4096;
    engine = kConstant;
    if (!backward) {
      return;
    }
    const int64_t rows = p.heads * p.sq * 4, dq = rows * p.d;
    // Engines for Ampere, which also run where there are none for the architecture itself, add dq
    // up in a copy of their own, whose rows are a multiple of 8; heads that share keys get their
    // own dk and dv first.
    const bool ampere = !spec.isa.starts_with("sm_9") && !spec.isa.starts_with("sm_10");
    const int64_t own = (ampere ? p.heads * ((p.sq + 7) / 8 * 8) * p.d * 4 : 0) +
                        (p.group() > 1 ? p.heads * p.sk * (p.d + p.e) * 2 : 0);
    samples = std::clamp<int64_t>(spec.workspace_cap / (rows + dq + own), 1, p.samples);
    while (samples < p.samples && !is_aligned(p, samples)) {
      samples = samples > 1 ? samples - 1 : std::min<int64_t>(4, p.samples);
    }
    const auto round_up = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    row_sums = round_up(samples * rows);
    dq_sums = round_up(samples * dq);
    engine += samples * own;
  }
  int64_t total() const { return row_sums + dq_sums + engine; }

 private:
  // Whether the next samples begin at a multiple of 16 bytes: they do after four in any case.
  static bool is_aligned(const Problem& p, int64_t samples) {
    const int64_t steps[] = {
        p.q.sample * 2, p.k.sample * 2, p.v.sample * 2, p.y.sample * 2, p.heads * p.sq * 4};
    return std::all_of(std::begin(steps), std::end(steps), [&](int64_t bytes) {
      return samples * bytes % 16 == 0;
    });
  }
};

// Both ways of one node: what cuDNN takes may still find no engine on the device at hand.
struct CudaScratch {
  std::optional<FusedScratch> fused;
  DeviceScratch apart;

  CudaScratch(const OpContext& op, const Problem& p, const DeviceSpec& spec)
      : fused(why_not_fused(op, p, spec) == nullptr
                  ? std::optional(FusedScratch(p, is_backward(op), spec))
                  : std::nullopt),
        apart(p, op.input_dtype(0), is_backward(op), with_room(spec, fused)) {}
  int64_t total() const { return std::max(fused ? fused->total() : 0, apart.total()); }

 private:
  static bool is_backward(const OpContext& op) { return op.node().op_type == "FusedAttentionGrad"; }
  // The second way is to cost no memory.
  static DeviceSpec with_room(DeviceSpec spec, const std::optional<FusedScratch>& fused) {
    if (fused) {
      spec.workspace_cap = std::min(spec.workspace_cap, fused->total());
    }
    return spec;
  }
};

}  // namespace trainrt::attention
