// What a fused kernel is given when it is launched (ops/fused_elementwise.cu): on the host, and in
// the text that NVRTC compiles.
#pragma once

#include <cstdint>

namespace trainrt {

struct FusedParams {
  static constexpr int kTensors = 8, kBroadcast = 4, kDims = 16;
  const void* in[kTensors];
  void* out[kTensors];  // null: nobody reads it
  int64_t n;            // elements of a result
  // Loops over a result as the broadcast inputs need them, and the steps of each such input.
  int64_t dims[kDims];
  int64_t strides[kBroadcast][kDims];
};

}  // namespace trainrt
