#include "parallel/communicator_memory.h"

namespace trainrt {

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// A connection to a peer, of one of NCCL's channels: where it receives, 0.5 + 4.7 + 4 MiB for its
// three protocols, 10 as they are allocated, and 2 where it sends (NVIDIA/nccl#1685).
constexpr int64_t kConnectionBytes = 12 * kMiB;

// A communicator whose ranks add up tensors. Measured between A100s on NVLink: 544 MiB with two
// ranks, 688 MiB with more (NVIDIA/nccl#964); 24 channels, each with connections for a ring and for
// a tree, are 576. Sharing (ncclCommSplit with splitShare) would save nothing: connections are
// shared by peer, and two groups of a rank have no other rank in common.
int64_t collective_bytes(int num_ranks) {
  return num_ranks < 2 ? 0 : (num_ranks == 2 ? 544 : 688) * kMiB;
}

// Of a stage: messages to and from two neighbours, each on as many channels as it has blocks.
constexpr int64_t kMessageBytes = 4 * kMessageBlocks * kConnectionBytes;

}  // namespace

int64_t communicator_bytes(int data, int tensor, int pipeline) {
  // Stages send each other messages and nothing else: their group's own communicator never connects
  // anybody.
  return collective_bytes(data) + collective_bytes(tensor) + (pipeline > 1 ? kMessageBytes : 0);
}

}  // namespace trainrt
