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
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "graph/dtype.h"
#include "graph/shard_spec.h"

namespace trainrt {

// An order of work of a device. On a CPU everything happens at once and there is no difference; on
// a GPU each is a stream, and one waits for another only where it is told to. Messages may have
// lanes of their own, past the named ones.
enum class Lane : int { kCompute, kCommunication };

// A message that a rank sends to `peer`, or receives from it.
struct Message {
  int peer = 0;
  int tag = 0;
  bool sends = false;
  int64_t bytes = 0;  // at most
  // Sends: where copies wait to be received, as many as fit (parallel/memory_plan). It outlives the
  // messages. May be empty.
  std::span<std::byte> room = {};
};

// A tensor that a collective works on in place.
struct WholeTensor {
  void* data = nullptr;
  int64_t count = 0;  // elements
};

// A tensor of which one side is cut: counts[r] elements, one segment after the other in rank order,
// are rank r's. reduce_scatter: `input` is whole and `output` the own segment; all_gather: the
// other way round.
struct CutTensor {
  const void* input = nullptr;
  void* output = nullptr;
  std::vector<int64_t> counts;
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // Several tensors of one dtype in one call (a bucket): one message's latency for all, while each
  // stays where it is. All ranks name tensors of the same sizes in the same order.
  virtual void all_reduce(const std::vector<WholeTensor>& tensors,
                          DType dtype,
                          ReductionKind reduction) = 0;
  // Of each tensor, rank r receives the sum of segment r.
  virtual void reduce_scatter(const std::vector<CutTensor>& tensors,
                              DType dtype,
                              ReductionKind reduction) = 0;
  // Of each tensor, segment r of `output` is rank r's `input`.
  virtual void all_gather(const std::vector<CutTensor>& tensors, DType dtype) = 0;

  // The same of one tensor.
  void all_reduce(void* data, int64_t count, DType dtype, ReductionKind reduction) {
    all_reduce({{data, count}}, dtype, reduction);
  }
  void reduce_scatter(const void* input,
                      void* output,
                      const std::vector<int64_t>& counts,
                      DType dtype,
                      ReductionKind reduction) {
    reduce_scatter({{input, output, counts}}, dtype, reduction);
  }
  void all_gather(const void* input,
                  void* output,
                  const std::vector<int64_t>& counts,
                  DType dtype) {
    all_gather({{input, output, counts}}, dtype);
  }

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

  // Collective, before the first message: those that this rank will send and receive, in its order,
  // which may be gone through again and again. For those (nccl) whose messages wait for each other
  // unless they have lanes of their own.
  virtual void expect_messages(const std::vector<Message>&) {}
  // The lane that a message's work is put on.
  virtual Lane lane_of(const Message&) const { return Lane::kCommunication; }

  // Collective: ranks of one color form a new group, ordered by key then rank.
  virtual std::unique_ptr<Communicator> split(int color, int key) = 0;
  // Publishes `reason` as this rank's failure: every rank waiting in or entering a call throws.
  // Callable from any thread; never throws.
  virtual void abort(const std::string& reason) noexcept = 0;
  // Throws when a rank's failure is known, for ranks that compute for long between two calls.
  virtual void throw_if_failed() const {}

  // Why this rank can call no more, once it knows; "" until then. Any thread.
  virtual std::string failure() const = 0;

  // For calls that the same ranks make beside this communicator (nccl): this rank has begun
  // `number` of them; who has begun fewer, as far as is known. Any thread.
  virtual void note_calls(int64_t) {}
  virtual std::vector<int> ranks_behind(int64_t) const { return {}; }
};

}  // namespace trainrt
