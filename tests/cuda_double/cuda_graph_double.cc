// The graphs of the double: what one stream captures, in the order in which it was asked for.
#include <cuda_runtime_api.h>

#include "tests/cuda_double/cuda_double.h"
#include "tests/cuda_double/cuda_streams.h"

using namespace cuda_double;

struct CUgraphExec_st {
  CUgraph_st graph;
};

#define DOUBLE_ENTRY(code)        \
  const Lock lock;                \
  if (enters_failure(__func__)) { \
    return code;                  \
  }

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  DOUBLE_ENTRY(cudaErrorIllegalState)
  const auto known = find_stream(stream);
  if (known == nullptr) {
    return cudaErrorInvalidResourceHandle;
  }
  if (known->capture != nullptr) {
    return cudaErrorIllegalState;
  }
  // Other modes forbid calls of threads that know nothing of the capture.
  if (mode != cudaStreamCaptureModeThreadLocal) {
    return cudaErrorNotSupported;
  }
  known->capture = std::make_shared<Capture>();
  known->capture->thread = std::this_thread::get_id();
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const Lock lock;
  const bool fails = enters_failure(__func__);
  *graph = nullptr;
  const auto known = find_stream(stream);
  if (known == nullptr || known->capture == nullptr) {
    return cudaErrorIllegalState;
  }
  if (known->capture->thread != std::this_thread::get_id()) {
    return cudaErrorStreamCaptureWrongThread;
  }
  const auto capture = std::move(known->capture);
  known->capture = nullptr;
  if (capture->invalid || fails) {
    return cudaErrorStreamCaptureInvalidated;
  }
  *graph = new CUgraph_st(std::move(capture->graph));
  count_alive("graphs", 1);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  count_alive("graphs", -1);
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  DOUBLE_ENTRY(cudaErrorMemoryAllocation)
  if (graph == nullptr || breaks_capture()) {
    return cudaErrorInvalidValue;
  }
  note_load(current_device());
  *exec = new CUgraphExec_st{*graph};
  count_alive("instantiated graphs", 1);
  return cudaSuccess;
}

// What has been launched still runs.
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  count_alive("instantiated graphs", -1);
  delete exec;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  DOUBLE_ENTRY(cudaErrorLaunchFailure)
  const auto known = find_stream(stream);
  if (exec == nullptr || known == nullptr || known->device != current_device()) {
    return cudaErrorInvalidResourceHandle;
  }
  if (known->capture != nullptr) {  // a graph within a graph: nobody makes one
    known->capture->invalid = true;
    return cudaErrorStreamCaptureUnsupported;
  }
  count_replay();
  for (const auto& work : exec->graph.work) {
    Op op;
    op.work = work;
    known->queue.push_back(std::move(op));
  }
  return cudaSuccess;
}

}  // extern "C"
