// The NCCL communicators of one rank: that of its group first, then one of two ranks for each
// channel of messages. They fail and close together.
//
// Calls are non-blocking: run() returns when the work is on its stream. An event behind each call
// is watched by a thread, which gives all up when a call has not ended by the deadline, when NCCL
// reports an error, and when the group knows of a failure; that ends this rank's waiting kernels,
// and nobody else's. That thread asks the driver, which may never answer; a second one tells the
// group then, and leaves it to others to end this process.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parallel/communicator.h"

namespace trainrt {

// The first of several results that is a refusal.
struct FirstRefusal {
  ncclResult_t result = ncclSuccess;
  void note(ncclResult_t next) {
    if (result == ncclSuccess && next != ncclInProgress) {
      result = next;
    }
  }
};

class NcclLinks {
 public:
  // `group` tells of failures and outlives this.
  NcclLinks(Communicator& group, int device, std::chrono::milliseconds deadline);
  // Collective, unless something has failed or an exception is on its way.
  ~NcclLinks();
  NcclLinks(const NcclLinks&) = delete;
  NcclLinks& operator=(const NcclLinks&) = delete;

  // Collective over the ranks of the new link, which all join their links in one order. Its calls
  // go to `stream`, on `blocks` thread blocks at most. Returns its number, from 0.
  size_t join(cudaStream_t stream,
              int num_ranks,
              const ncclUniqueId& id,
              int rank,
              int blocks = NCCL_CONFIG_UNDEF_INT);
  cudaStream_t stream(size_t link) const { return links_[link].stream; }

  // `call` is made under a lock. Throws kCommunication.
  void run(size_t link,
           const std::string& name,
           const std::function<ncclResult_t(ncclComm_t)>& call);

  // Why this rank can call no more; "" while it can.
  std::string failure() const;
  void throw_failure() const;
  // The first reason stays. Tells nobody.
  void give_up(const std::string& reason) noexcept;

 private:
  // A communicator of NCCL and the stream of its calls.
  struct Link {
    cudaStream_t stream = nullptr;
    ncclComm_t comm = nullptr;  // null: not joined, or given up
    int64_t number = 0;         // of its next call
  };
  struct Call {
    size_t link;
    int64_t number;
    std::string name;
    cudaEvent_t done;
    std::chrono::steady_clock::time_point started;
  };

  void finish(Link& link, ncclResult_t result, const std::string& name);
  void watch_call(Call call);
  void watch();
  std::string look(std::unique_lock<std::mutex>& lock);
  void guard(const std::stop_token& stopped);
  std::string late(const Call& call) const;
  void report(const std::string& reason);
  bool close() noexcept;

  Communicator& group_;
  int device_;
  std::chrono::milliseconds deadline_;
  int exceptions_;  // under way when this was made

  mutable std::mutex mutex_;  // of what follows, and of calls of NCCL that an abort must not meet
  std::condition_variable changed_;
  std::string failure_;
  std::deque<Link> links_;
  std::deque<Call> calls_;  // under way, in order
  std::vector<cudaEvent_t> free_events_;
  bool closing_ = false;
  // When the watcher last said that it is alive; 0: it need not.
  std::atomic<std::chrono::steady_clock::rep> alive_{0};
  std::thread watcher_;
  std::jthread guard_;
};

}  // namespace trainrt
