// Collectives and messages of processes on one host, through memory that they share.
//
// A collective is a row of rounds: each rank writes a piece of its data into its own area, arrives,
// waits for the others' arrivals and reads theirs. Areas alternate, so that a rank may write for
// the next round while others still read: none can be two rounds ahead. Sums are taken in rank
// order by the code that sums between threads.
#pragma once

#include <memory>

#include "parallel/process_communicator.h"

namespace trainrt {

// Null when the members of `group` are on several hosts or cannot share memory; the same on all of
// them. Collective over the group, whose members agree by `network`.
std::unique_ptr<Communicator> make_shared_communicator(const ProcessGroup& group,
                                                       Communicator& network);

}  // namespace trainrt
