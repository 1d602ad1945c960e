// Starts the ranks of this process as threads and joins them.
#pragma once

#include <functional>

#include "parallel/communicator.h"

namespace trainrt {

// Calls body(rank, world) for every rank; with one rank on the calling thread and without a
// communicator. A rank that fails releases the others; the first failure is rethrown, preferably
// one that is not the echo of another's.
void run_ranks(int num_ranks,
               double deadline_seconds,
               const std::function<void(int rank, Communicator* world)>& body);

}  // namespace trainrt
