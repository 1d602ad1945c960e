// What the operating system says about this machine.
#pragma once

#include <cstdint>
#include <string>

namespace trainrt {

struct Machine {
  std::string cpu;           // model name
  std::string isa;           // best vector unit: "avx512", "avx2", "sse"
  int cores = 1;             // that this process may use
  int64_t memory_bytes = 0;  // in all, or the control group's limit
  int64_t available_bytes = 0;
  std::string driver_library;  // of CUDA, empty without
};

Machine describe_machine();

// Memory that can still be used without swapping; 0 when unknown.
int64_t available_memory_bytes();

// Cores this process may use (its affinity mask).
int num_usable_cores();

}  // namespace trainrt
