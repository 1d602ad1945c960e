// NCCL between GPUs, one per rank.
//
// Calls return when the work is on its stream; tensors lie in device memory. Each call is watched
// by a thread of the communicator: when it has not ended by the deadline, NCCL reports an error, or
// a rank of the group is known to have failed, the communicator is aborted, which ends the waiting
// kernels of this rank, and every later call throws kCommunication with the reason. What the
// kernels were to write is then undefined: see failure() before using it. Sums are NCCL's: equal on
// all ranks, in an order of its own. Calls are made by threads on which the device is current.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <functional>
#include <memory>
#include <utility>

#include "parallel/communicator.h"

namespace trainrt {

// Where a rank's work goes.
struct NcclPlace {
  int device = 0;
  cudaStream_t stream = nullptr;                            // of collectives
  std::function<std::pair<Lane, cudaStream_t>()> add_lane;  // makes one for messages
  std::chrono::milliseconds deadline{60000};
};

// Collective over `group`, whose ranks become those of the new communicator, which outlives it,
// carries the identifiers by which they meet, and knows of failures. Throws kCommunication.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& group, const NcclPlace& place);

}  // namespace trainrt
