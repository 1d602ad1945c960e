// See runtime/cuda_versions.h.
#include "runtime/cuda_versions.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <nccl.h>
#include <nvrtc.h>

#include "graph/base/cuda_check.h"

namespace trainrt {

namespace {

// The first one without these: 9.8 to 9.14 give wrong convolutions of 16-bit floats over three
// spatial dims (pytorch issue 163539); 9.10.2 to 9.15.0 give NaN for the gradient of fused
// attention where the number of keys is no multiple of 128 (cudnn-frontend 1.16's release notes);
// fused attention of 9.10's first releases is wrong in other ways, and older ones want the sums of
// dq zeroed for them.
constexpr size_t kOldestCudnn = 91501;

std::string cudnn_text(size_t version) {
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace

std::string cuda_version_text(int version) {
  return concat(version / 1000, ".", version % 1000 / 10);
}

std::string cuda_library_versions() {
  int driver = 0, runtime = 0, nccl = 0, nvrtc_major = 0, nvrtc_minor = 0;
  TRAINRT_CUDA_CHECK(cudaDriverGetVersion(&driver));
  TRAINRT_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  TRAINRT_REQUIRE(ncclGetVersion(&nccl) == ncclSuccess, kDevice, "ncclGetVersion failed");
  TRAINRT_CUDA_CHECK(nvrtcVersion(&nvrtc_major, &nvrtc_minor));
  const size_t cublas = cublasLtGetVersion();
  return concat("driver ",
                cuda_version_text(driver),
                ", runtime ",
                cuda_version_text(runtime),
                ", NVRTC ",
                nvrtc_major,
                ".",
                nvrtc_minor,
                ", cuBLAS ",
                cublas / 10000,
                ".",
                cublas / 100 % 100,
                ", cuDNN ",
                cudnn_text(cudnnGetVersion()),
                ", NCCL ",
                nccl / 10000,
                ".",
                nccl / 100 % 100,
                ".",
                nccl % 100);
}

void require_sound_cudnn() {
  const size_t version = cudnnGetVersion();
  TRAINRT_REQUIRE(version >= kOldestCudnn,
                  kDevice,
                  "cuDNN ",
                  cudnn_text(version),
                  " computes wrong convolutions and attention; ",
                  cudnn_text(kOldestCudnn),
                  " or newer is needed: install one, or put its folder first in LD_LIBRARY_PATH. "
                  "--devices cpu runs without it");
}

}  // namespace trainrt
