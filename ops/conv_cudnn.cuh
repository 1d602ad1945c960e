// Convolutions by cuDNN's graph API: graphs of one operation.
#pragma once

#include <memory>

#include "graph/op_def.h"
#include "ops/cudnn_graph.cuh"

namespace trainrt::cudnn {

// Why cuDNN is not asked for a convolution of floating numbers; null: it is, or there is nothing to
// compute.
const char* why_not_asked(const OpContext& op);

// One node's convolution. Images in nhwc go with weights in the same order, which cuDNN's tensor
// core engines want: ours are copied into the workspace on the way in (or out, for their gradient).
class ConvolutionPlan {
 public:
  explicit ConvolutionPlan(const OpContext& op);
  ~ConvolutionPlan();
  ConvolutionPlan(const ConvolutionPlan&) = delete;
  ConvolutionPlan& operator=(const ConvolutionPlan&) = delete;

  // False: no engine can; nothing was done. The answer is the same at every call.
  bool run(KernelContext& context);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trainrt::cudnn
