// Memory of the double's devices, and pinned memory of the host: each allocation between guard
// pages. Everything here is called under `Lock` (cuda_streams.h).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace cuda_double {

void reset_memory(int num_devices);
cudaError_t allocate(void** to, size_t bytes, int device, bool host);
cudaError_t release(void* data, bool host);
size_t used_bytes(int device);
// Memory of a library of its own: false when there is not as much. `bytes` may be below zero.
bool take_bytes(int device, std::ptrdiff_t bytes, size_t memory_bytes);
size_t most_used_bytes(int device);  // since reset_memory()
size_t num_allocations();

// Device of a live allocation that holds all of [data, data + bytes), or one of the next two.
inline constexpr int kPinned = -1, kUnknown = -2;
int owner_of(const void* data, size_t bytes);

// Device memory may be touched while one lives.
class MemoryAccess {
 public:
  MemoryAccess();
  ~MemoryAccess();
  MemoryAccess(const MemoryAccess&) = delete;
  MemoryAccess& operator=(const MemoryAccess&) = delete;
};

}  // namespace cuda_double
