// Byte transfers between this process and every other of a job, over Gloo's TCP transport.
//
// Every wait has a deadline and ends at once when the job's failure becomes known. After a throw
// no transfer is possible any more.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "parallel/rendezvous.h"

namespace gloo::transport {
class Context;
class Device;
class UnboundBuffer;
}  // namespace gloo::transport

namespace trainrt {

class GlooMesh {
 public:
  // A transfer under way; the memory is the caller's until wait() has returned.
  struct Transfer {
    std::shared_ptr<gloo::transport::UnboundBuffer> buffer;
    int peer = -1;
    bool receives = false;
  };

  // Connects to all ranks. Collective. Throws kCommunication.
  explicit GlooMesh(std::shared_ptr<Rendezvous> rendezvous);
  ~GlooMesh();
  GlooMesh(const GlooMesh&) = delete;
  GlooMesh& operator=(const GlooMesh&) = delete;

  Rendezvous& rendezvous() const { return *rendezvous_; }

  // Transfers of one slot between two ranks are matched in order; both sides name equal sizes.
  // Peers are world ranks, never this one.
  Transfer send(const void* data, int64_t bytes, int peer, uint64_t slot);
  Transfer receive(void* data, int64_t bytes, int peer, uint64_t slot);
  // Takes the memory over; nobody waits for it.
  void post(std::vector<std::byte> data, int peer, uint64_t slot);

  // `doing` says in which call this rank waits: "all_reduce #3 of ranks 0, 1".
  void wait(const Transfer& transfer, const std::string& doing, SteadyClock::time_point end);
  // This rank has waited for `peer` to the deadline: finds out who is to blame, and tells all.
  [[noreturn]] void throw_stalled(const std::string& doing, int peer);
  [[noreturn]] void throw_failure(const std::string& doing, const Failure& failure) const;

 private:
  struct Posted {
    std::vector<std::byte> data;
    Transfer transfer;
  };
  void connect();
  void close_pairs();
  // This rank's wait for `peer`, which was to last until `end`, ended by a failure of the job, in
  // time or for the reason `broken`: throws what that comes to.
  [[noreturn]] void throw_ended(const std::string& doing,
                                int peer,
                                SteadyClock::time_point end,
                                const std::string& broken);
  void release_posted();
  bool wait_in_gloo(const Transfer& transfer, std::chrono::milliseconds timeout);
  void interrupt();

  std::shared_ptr<Rendezvous> rendezvous_;
  std::shared_ptr<gloo::transport::Device> device_;
  std::shared_ptr<gloo::transport::Context> context_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<const Transfer*> waiting_;  // to be interrupted by a failure
  std::deque<Posted> posted_;
  bool stopping_ = false;
  std::thread releaser_;  // waits for posted sends, since Gloo cannot be asked whether one is done
};

}  // namespace trainrt
