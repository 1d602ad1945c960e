// NCCL between GPUs, one per rank.
//
// Calls return when the work is on the stream; tensors lie in device memory. Each call is watched
// by a thread of the communicator: when it has not ended by the deadline, or NCCL reports an error,
// the communicator is aborted, which ends the waiting kernels of this rank, and every later call
// throws kCommunication with the reason. Sums are NCCL's: equal on all ranks, in an order of its
// own.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <memory>

#include "parallel/communicator.h"

namespace trainrt {

// Collective over `group`, whose ranks become those of the new communicator and which carries the
// identifier that they meet by. Work goes to `stream` of GPU `device`. Throws kCommunication.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& group,
                                                     int device,
                                                     cudaStream_t stream,
                                                     std::chrono::milliseconds deadline);

}  // namespace trainrt
