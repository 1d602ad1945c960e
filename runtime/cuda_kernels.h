// Kernels that are compiled while the program runs: the only file that calls NVRTC. For one
// architecture; the devices of a process share them. Safe to use from any thread.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <string>

#include "graph/cuda_context.h"
#include "graph/cuda_handle.h"

namespace trainrt {

class CompiledKernels {
 public:
  // `isa`: "sm_90". What is compiled is kept in `folder` for the runs to come; "": nowhere. A file
  // that cannot be read or written is no reason to fail.
  CompiledKernels(std::string isa, std::string folder);

  // Throws kDevice where NVRTC, or the driver, does not take it.
  cudaKernel_t find(const DeviceSource& source);

 private:
  std::string machine_code(const DeviceSource& source) const;

  std::string isa_, folder_;
  std::mutex mutex_;
  struct Loaded {
    cuda::Owned<cudaLibrary_t, cudaLibraryUnload> library;
    cudaKernel_t kernel = nullptr;
  };
  std::map<std::string, Loaded> loaded_;  // by text
};

}  // namespace trainrt
