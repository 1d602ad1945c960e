// Collectives between the ranks of one group. Implementations: thread (ranks as threads of one
// process), gloo (CPU processes), nccl (GPUs).
//
// Every call is blocking for the host unless the implementation says otherwise (nccl enqueues on
// the stream given at creation), is made by every rank of the group in the same order, and ends
// within the deadline or throws kCommunication naming the collective, its sequence number, the
// ranks that are missing and, if a rank failed first, that rank and its reason. After a throw the
// communicator is unusable. Sums are taken in rank order (rank 0 first) in the tensors' own dtype;
// bit-identical on all ranks and between runs.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "graph/dtype.h"
#include "graph/shard_spec.h"

namespace trainrt {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // In place on `count` elements.
  virtual void all_reduce(void* data, int64_t count, DType dtype, ReductionKind reduction) = 0;
  // Rank r receives the sum of segment r; segments have counts[r] elements and lie one after the
  // other in `input`.
  virtual void reduce_scatter(const void* input,
                              void* output,
                              const std::vector<int64_t>& counts,
                              DType dtype,
                              ReductionKind reduction) = 0;
  // Segment r of `output` is rank r's `input` of counts[r] elements.
  virtual void all_gather(const void* input,
                          void* output,
                          const std::vector<int64_t>& counts,
                          DType dtype) = 0;
  // send_counts[r] elements go to rank r, recv_counts[r] come from it, segments in rank order.
  virtual void all_to_all(const void* input,
                          const std::vector<int64_t>& send_counts,
                          void* output,
                          const std::vector<int64_t>& recv_counts,
                          DType dtype) = 0;
  virtual void broadcast(void* data, int64_t bytes, int root) = 0;
  // send() may return before the peer has received (the data is copied or enqueued).
  virtual void send(const void* data, int64_t bytes, int peer, int tag) = 0;
  virtual void recv(void* data, int64_t bytes, int peer, int tag) = 0;
  virtual void barrier() = 0;

  // Collective: ranks of one color form a new group, ordered by key then rank.
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;
  // Publishes `reason` as this rank's failure: every rank waiting in or entering a call throws.
  // Callable from any thread; never throws.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Throws when a rank's failure is known, for ranks that compute for long between two calls.
  virtual void throw_if_failed() const {}
};

}  // namespace trainrt
