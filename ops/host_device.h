// Marks functions that run on both devices: CUDA's compiler wants it said, the host's need not
// know.
#pragma once

#ifdef __CUDACC__
#define TRAINRT_HOST_DEVICE __host__ __device__
#else
#define TRAINRT_HOST_DEVICE
#endif
