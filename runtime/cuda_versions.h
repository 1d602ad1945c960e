// Versions of CUDA's libraries as they are installed: not always those that were built with.
#pragma once

#include <string>

namespace trainrt {

std::string cuda_version_text(int version);  // 13020 -> "13.2"

// "driver 13.0, runtime 13.0, NVRTC 13.1, cuBLAS 13.1, cuDNN 9.19.0, NCCL 2.28.9"
std::string cuda_library_versions();

// Throws kDevice for a cuDNN that computes wrong results.
void require_sound_cudnn();

}  // namespace trainrt
