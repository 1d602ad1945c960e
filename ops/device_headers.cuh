// Sources of this folder that the build takes along as text (cmake/Embed.cmake), for kernels that
// are compiled while the program runs.
#pragma once

#include <span>

#include "graph/cuda_context.h"

namespace trainrt {

// ops/device_std.cuh, ops/fused_kernel.cuh, ops/functors.h, and what these include of this folder.
std::span<const DeviceHeader> device_headers();

}  // namespace trainrt
