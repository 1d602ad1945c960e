// What the operating system says about this machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/load_cuda.h"

namespace trainrt {

struct Machine {
  std::string cpu;           // model name
  std::string isa;           // best vector unit: "avx512", "avx2", "sse"
  int cores = 1;             // that this process may use
  int64_t memory_bytes = 0;  // in all, or the control group's limit
  int64_t available_bytes = 0;
  std::vector<CudaDeviceInfo> gpus;
  std::string cuda_versions;  // of driver and libraries; empty without GPUs
  std::string no_gpu_reason;  // what is missing; empty with GPUs
};

Machine describe_machine();

// Memory that can still be used without swapping; 0 when unknown.
int64_t available_memory_bytes();

// Cores this process may use (its affinity mask).
int num_usable_cores();

}  // namespace trainrt
