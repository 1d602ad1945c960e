// Shared by the forward and gradient kernels of FusedAttention (ops/attention.cc describes it).
#pragma once

#include <vector>

#include "graph/op_def.h"

namespace trainrt::attention {

// Where the rows of a tensor lie, in elements: row i of (sample, head) begins at
// sample * this->sample + head * this->head + i * this->row.
struct Layout {
  int64_t sample = 0, head = 0, row = 0;

  int64_t offset(int64_t s, int64_t h) const { return s * sample + h * head; }
};

// Sizes and attributes of one node. Samples are all dims before the heads.
struct Problem {
  int64_t samples = 1, heads = 1, kv_heads = 1, sq = 1, sk = 1, d = 1, e = 1;
  Layout q, k, v, y;
  double scale = 1;
  bool causal = false;
  double ratio = 0;     // of dropout
  Shape probabilities;  // sample dims, heads, sq, sk
  bool has_mask = false;
  Shape mask_strides;  // of the mask, over the dims of `probabilities`

  // Query heads that share one head of k and v.
  int64_t group() const { return heads / kv_heads; }
  // Keys that query i may see: [0, visible(i)).
  int64_t visible(int64_t i) const { return causal ? (i + 1 < sk ? i + 1 : sk) : sk; }
  // Of mask(sample, head, i, 0), `index` being sample * heads + head.
  int64_t mask_offset(int64_t index, int64_t i) const;
  bool mask_varies_by_head() const;
  bool mask_varies_by_sample() const;
};

constexpr int kMaskInput = 3;  // of both operators: q, k, v, mask[, y, lse, dy, dlse]

// The four entries of attribute `sequence_major`.
enum Operand { kQ, kK, kV, kY };
bool is_sequence_major(const Attributes& attributes, Operand operand);
// [..., heads, rows, width] of a shape that may be [..., rows, heads, width].
Shape head_major(Shape shape, bool sequence_major);

Problem problem_of(const OpContext& op);
Problem problem_of(const KernelContext& op);

// Whether the draw for a probability keeps it: draws are at least this.
uint32_t drop_limit(double ratio);

int64_t forward_workspace(const OpContext& op, const DeviceSpec& spec);
int64_t backward_workspace(const OpContext& op, const DeviceSpec& spec);
void forward_fast(KernelContext& op);
void backward_fast(KernelContext& op);
void forward_reference(KernelContext& op);
void backward_reference(KernelContext& op);

}  // namespace trainrt::attention
