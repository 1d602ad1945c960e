// What CUDA kernels see of their device beyond DeviceContext: the libraries' handles, which belong
// to one device and one stream. Implemented by runtime/cuda_device.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>

#include <memory>
#include <span>
#include <string>

#include "graph/algorithm_cache.h"
#include "graph/kernel.h"

namespace trainrt {

struct DeviceHeader {
  const char* name;
  const char* text;
};

// A kernel's text, with what it includes. The kernel's name is kCompiledKernel.
struct DeviceSource {
  std::string text;
  std::span<const DeviceHeader> headers;
};
inline constexpr const char* kCompiledKernel = "compiled";

class CudaContext : public DeviceContext {
 public:
  virtual cudaStream_t cuda_stream() = 0;
  virtual cublasLtHandle_t cublas() = 0;   // made at the first call
  virtual cudnnHandle_t cudnn() = 0;       // made at the first call; launches on cuda_stream()
  virtual bool deterministic() const = 0;  // only algorithms that give equal bits every time
  virtual bool tf32() const = 0;           // float32 products may round their operands to TF32
  virtual const std::string& device_name() const = 0;
  virtual AlgorithmCache& algorithms() = 0;
  // Null until it is set: what kernels of one problem share, under a name of theirs, for as long as
  // the device lives.
  virtual std::shared_ptr<const void>& shared(const std::string& name) = 0;
  // By NVRTC at the first call for this text on any device of the process, or from the file in
  // which an earlier run kept it. Lives as long as the device.
  virtual cudaKernel_t compiled(const DeviceSource& source) = 0;
  // Logs a text once, however often it is given: what runs another way than one would expect.
  virtual void note(const std::string& text) = 0;
};

// Every device whose spec says Backend::kCuda is one.
inline CudaContext& cuda_context(KernelContext& context) {
  return static_cast<CudaContext&>(context.device());
}

}  // namespace trainrt
