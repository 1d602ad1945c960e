// What communication takes of a device's memory beside what a plan lays out: NCCL's own buffers, on
// GPUs. It takes them when ranks first exchange something, so they must be left free until then.
#pragma once

#include <cstdint>

namespace trainrt {

// Thread blocks of a message: one that waits for its peer holds them.
inline constexpr int kMessageBlocks = 4;

// Of a rank's communicators on its GPU, in a plan of these degrees; 0 for one rank alone.
int64_t communicator_bytes(int data, int tensor, int pipeline);

}  // namespace trainrt
