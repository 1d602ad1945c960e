// Handles of CUDA's libraries that free themselves. Freeing never throws: nothing could be done
// about it.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

namespace trainrt::cuda {

template <typename Handle, auto kDestroy>
class Owned {
 public:
  Owned() = default;
  ~Owned() {
    if (handle_ != nullptr) {
      static_cast<void>(kDestroy(handle_));
    }
  }
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  Handle get() const { return handle_; }
  Handle* put() { return &handle_; }

 private:
  Handle handle_ = nullptr;
};

using Stream = Owned<cudaStream_t, cudaStreamDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;
using Memory = Owned<void*, cudaFree>;
using PinnedMemory = Owned<void*, cudaFreeHost>;

}  // namespace trainrt::cuda
