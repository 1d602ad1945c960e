// From the codes of CUDA's libraries to Error: the only place that knows what they mean.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <nvrtc.h>

#include <string>

#include "graph/base/error.h"

namespace trainrt::cuda {

struct Failure {
  bool failed = false;
  bool out_of_memory = false;
  std::string reason;
};

inline Failure failure_of(cudaError_t code) {
  if (code == cudaSuccess) {
    return {};
  }
  return {true,
          code == cudaErrorMemoryAllocation,
          concat(cudaGetErrorName(code),
                 ": ",
                 cudaGetErrorString(code),
                 code == cudaErrorNoKernelImageForDevice
                     ? "; this build has no code for the GPU's architecture (TRAINRT_GPU_ARCH, "
                       "CMAKE_CUDA_ARCHITECTURES)"
                     : "")};
}

inline Failure failure_of(cublasStatus_t code) {
  if (code == CUBLAS_STATUS_SUCCESS) {
    return {};
  }
  return {true,
          code == CUBLAS_STATUS_ALLOC_FAILED,
          concat(cublasLtGetStatusName(code), ": ", cublasLtGetStatusString(code))};
}

inline Failure failure_of(cudnnStatus_t code) {
  if (code == CUDNN_STATUS_SUCCESS) {
    return {};
  }
  return {true, code == CUDNN_STATUS_ALLOC_FAILED, cudnnGetErrorString(code)};
}

inline Failure failure_of(nvrtcResult code) {
  if (code == NVRTC_SUCCESS) {
    return {};
  }
  return {true, code == NVRTC_ERROR_OUT_OF_MEMORY, nvrtcGetErrorString(code)};
}

// Takes back the thread's last error, which libraries would find after calls of their own.
[[noreturn]] inline void fail(const Failure& failure, const char* call) {
  static_cast<void>(cudaGetLastError());
  const std::string function = std::string(call).substr(0, std::string(call).find('('));
  if (failure.out_of_memory) {
    TRAINRT_FAIL(kOutOfMemory,
                 function,
                 " failed: ",
                 failure.reason,
                 ". Another program may hold the GPU's memory (nvidia-smi shows it); else use a "
                 "smaller --micro-batch-size or --recompute full");
  }
  TRAINRT_FAIL(kDevice, function, " failed: ", failure.reason);
}

}  // namespace trainrt::cuda

// Calls a function of cudart, cuBLASLt, cuDNN or NVRTC and throws kOutOfMemory or kDevice when it
// fails.
#define TRAINRT_CUDA_CHECK(call)                                                        \
  do {                                                                                  \
    const ::trainrt::cuda::Failure trainrt_failure = ::trainrt::cuda::failure_of(call); \
    if (trainrt_failure.failed) {                                                       \
      ::trainrt::cuda::fail(trainrt_failure, #call);                                    \
    }                                                                                   \
  } while (false)
