// Ranks as threads of one process: a collective exchanges pointers, and every rank reduces or
// copies its part straight out of the others' memory.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "parallel/communicator.h"

namespace trainrt {

// One communicator per rank of a new world. Each is used by one thread at a time; all of them, and
// the groups split from them, share one failure notice.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(
    int world_size, std::chrono::milliseconds deadline);

}  // namespace trainrt
