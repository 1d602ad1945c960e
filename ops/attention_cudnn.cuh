// FusedAttention and its gradient as graphs that cuDNN's fused attention engines take: scores never
// reach memory. why_not_fused (ops/attention_scratch.h) says what is not asked for.
#pragma once

#include <map>

#include "ops/attention.h"
#include "ops/attention_scratch.h"
#include "ops/cudnn_graph.cuh"

namespace trainrt::attention {

// The tensors of the graphs. What lies in memory comes first.
enum ForwardTensor : int64_t { kFwdQ = 1, kFwdK, kFwdV, kFwdY, kFwdLse, kFwdScale, kFwdHidden };
enum BackwardTensor : int64_t {
  kBwdQ = 1,
  kBwdK,
  kBwdV,
  kBwdY,
  kBwdLse,
  kBwdDy,
  kBwdDq,
  kBwdDk,
  kBwdDv,
  kBwdRowSums,  // float32 [samples, heads, sq]: sum of y dy, in the workspace
  kBwdDqSums,   // float32 [samples, heads, sq, d]: dq as it is added up, in the workspace
  kBwdScale,
  kBwdOne,
  kBwdHidden
};

// Graphs for `samples` of the problem's samples.
cudnn::Graph forward_graph(const Problem& p, DType dtype, int64_t samples);
cudnn::Graph backward_graph(const Problem& p, DType dtype, int64_t samples);

// One node, a number of samples at a time.
class FusedAttention {
 public:
  FusedAttention(const OpContext& op, const Problem& p, const FusedScratch& cut);

  // False: no engine can. The outputs may then hold anything.
  bool run(KernelContext& context);
  // After run() said so.
  std::string why_not(const CudaContext& context) const;

 private:
  bool run_samples(KernelContext& context, int64_t first, int64_t count);
  Problem problem_;
  FusedScratch cut_;
  DType dtype_;
  bool backward_;
  std::map<int64_t, cudnn::PlannedGraph> graphs_;  // by number of samples
  const cudnn::PlannedGraph* refused_ = nullptr;   // one of them
};

}  // namespace trainrt::attention
