// Shared by the forward and gradient kernels of FusedAttention (ops/attention.cc describes it).
#pragma once

#include <vector>

#include "graph/op_def.h"

namespace trainrt::attention {

// Sizes and attributes of one node. Heads are all leading dims together.
struct Problem {
  int64_t heads = 1, sq = 1, sk = 1, d = 1, e = 1;
  double scale = 1;
  bool causal = false;
  double ratio = 0;     // of dropout
  Shape probabilities;  // leading dims, sq, sk
  bool has_mask = false;
  Shape mask_strides;  // of the mask, over the dims of `probabilities`

  // Keys that query i may see: [0, visible(i)).
  int64_t visible(int64_t i) const { return causal ? (i + 1 < sk ? i + 1 : sk) : sk; }
  int64_t mask_offset(int64_t head, int64_t i) const;  // of mask(head, i, 0)
};

constexpr int kMaskInput = 3;  // of both operators: q, k, v, mask[, y, lse, dy]

Problem problem_of(const OpContext& op);
Problem problem_of(const KernelContext& op);

int64_t forward_workspace(const OpContext& op, const DeviceSpec& spec);
int64_t backward_workspace(const OpContext& op, const DeviceSpec& spec);
void forward_fast(KernelContext& op);
void backward_fast(KernelContext& op);
void forward_reference(KernelContext& op);
void backward_reference(KernelContext& op);

}  // namespace trainrt::attention
