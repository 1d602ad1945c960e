// Ranks as processes, on one host or several, over Gloo's TCP transport; groups whose members are
// all on one host share memory instead.
//
// Gloo's own collectives sum in an order that depends on the algorithm; here sums are taken in rank
// order by the same code as between threads, so N processes give the bits of N threads. Bytes that
// a rank sends, with n ranks and b bytes: all_reduce 2 b (n-1)/n, reduce_scatter and all_gather b
// (n-1)/n, broadcast b (n-1) from the root. Beyond the caller's buffers a communicator holds at
// most 8 MiB (in shared memory 2 MiB for each rank), and copies of what was sent and not received.
#pragma once

#include <memory>

#include "parallel/communicator.h"
#include "parallel/rendezvous.h"

namespace trainrt {

// The world of a job. Collective over the ranks of `rendezvous`; the deadline is the rendezvous'.
std::unique_ptr<Communicator> make_gloo_communicator(std::shared_ptr<Rendezvous> rendezvous,
                                                     bool may_share_memory = true);

}  // namespace trainrt
