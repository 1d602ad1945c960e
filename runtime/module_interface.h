// What tells a CUDA back end of other sources from ours: the program and the module hand each other
// C++ objects, which both must lay out alike.
#pragma once

#include <cstdint>

#include "graph/kernel_pair.h"
#include "graph/op_def.h"
#include "runtime/load_cuda.h"

namespace trainrt {

// A constant, so that each side has that of its own sources. Counted up by hand where a virtual
// function comes, goes or moves and no size tells.
inline constexpr uint64_t kModuleInterface = [] {
  uint64_t hash = 1;
  for (const uint64_t part : {sizeof(Node),
                              sizeof(Value),
                              sizeof(Tensor),
                              sizeof(TensorRef),
                              sizeof(OpDef),
                              sizeof(OpContext),
                              sizeof(NodePair),
                              sizeof(KernelContext),
                              sizeof(StepContext),
                              sizeof(DeviceSpec),
                              sizeof(DeviceOptions),
                              sizeof(DeviceContext),
                              sizeof(CudaDeviceInfo)}) {
    hash = (hash ^ part) * 0x100000001b3;
  }
  return hash;
}();

}  // namespace trainrt
