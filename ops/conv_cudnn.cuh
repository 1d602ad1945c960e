// Convolutions by cuDNN's graph API: a graph of one operation, run by the fastest of the engines
// that its heuristics propose and that keep to the rules of the run (workspace, determinism,
// precision).
#pragma once

#include <memory>
#include <span>
#include <string>

#include "graph/cuda_context.h"
#include "graph/op_def.h"

namespace trainrt::cudnn {

// Whether cuDNN is asked at all: see ops/conv.cu.
bool takes(const OpContext& op);

// One node's convolution. Images in nhwc go with weights in the same order, which cuDNN's tensor
// core engines want: ours are copied into the workspace on the way in (or out, for their gradient).
class ConvolutionPlan {
 public:
  ConvolutionPlan(const OpContext& op, const DeviceSpec& spec);
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
