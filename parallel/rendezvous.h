// How the processes of a job meet, agree, and learn of each other's end.
//
// Rank 0 listens at an address that every rank was told; each rank, rank 0 too, keeps one
// connection to it for as long as it runs. Over it go the introduction (who is where), small
// exchanges before training, what each rank is doing (twice a second), and the first failure, which
// is told to all with its origin. Tensors go elsewhere.
//
// What ends a job, and how it is known: a rank that fails publishes why; a process that dies closes
// its connection, which is noticed at once; a host or a link that dies answers no probe for
// kHostTimeout; a process that is stopped tells no more what it does, nor, as rank 0, that it
// lives, which is noticed when that has lasted for a deadline; one that hangs is found by the
// deadline of whoever waits for it, and rank 0 follows the chain of who waits for whom to its end.
//
// A job has a name and a generation, which grows by one when its launcher starts it anew: a rank is
// let in by a rank 0 of its own generation only, and one that a newer generation calls at ends.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/base/error.h"
#include "parallel/socket.h"

namespace trainrt {

inline constexpr std::chrono::milliseconds kHostTimeout{4000};
// What a rank that finds a broken connection waits for the notice of who broke it.
inline constexpr std::chrono::milliseconds kNoticeTimeout{1000};

// What a launcher tells a process.
struct RankPlace {
  int rank = 0;
  int world_size = 1;
  std::string host = "127.0.0.1";  // where rank 0 listens
  int port = 0;
  int listening_fd = -1;  // rank 0: a socket that already listens there, which it comes to own
  std::string job;        // name of the job; "" when the launcher gives none
  int64_t generation = 0;
  std::string version;  // of the program
  // For tests of failures: this process stops itself (SIGSTOP) when it begins the first activity
  // whose name begins so. "" never does.
  std::string stop_at;
};

struct Failure {
  int rank = -1;  // where it began
  ErrorCode code = ErrorCode::kCommunication;
  std::string message;  // names the rank
};

// What a rank is doing; `waits_for` is the rank whose data it lacks, -1 when it computes.
struct RankActivity {
  std::string doing = "starting";
  int waits_for = -1;
};

// Named facts that must be equal on all ranks, in the order in which a difference is to be told.
using Facts = std::vector<std::pair<std::string, std::string>>;

class Rendezvous {
 public:
  // Returns when all ranks have come. Throws kCommunication when one has not within `deadline`
  // (naming it), when the port is taken or rank 0 cannot be reached, and kInvalidArgument when a
  // rank has another version or world size, or its number is taken.
  static std::unique_ptr<Rendezvous> join(const RankPlace& place,
                                          std::chrono::milliseconds deadline);
  // In place of joining, for a rank that cannot take part: the others fail with `failure` instead
  // of waiting for it. Takes at most `timeout`.
  static void decline(const RankPlace& place,
                      const Failure& failure,
                      std::chrono::milliseconds timeout) noexcept;
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  int rank() const;
  int world_size() const;
  std::chrono::milliseconds deadline() const;
  // How other ranks reach this one's host.
  const std::string& address() const;
  // Equal for ranks of one host (or of one container of it).
  const std::string& host_of(int rank) const;

  // Every rank's `mine`, in rank order. Collective; `what` says what it is for.
  std::vector<std::string> exchange(const std::string& what, const std::string& mine);
  // Throws kInvalidArgument on all ranks, naming the first difference from rank 0. Collective.
  void agree(const Facts& facts);

  void set_activity(const std::string& doing, int waits_for);

  // Makes it the job's failure unless there is one. Never throws; any thread.
  void publish(const Failure& failure) noexcept;
  std::optional<Failure> failure() const;
  // The job's failure as soon as it is known, nothing after `timeout`.
  std::optional<Failure> wait_for_failure(std::chrono::milliseconds timeout) const;
  // Who is to blame when this rank has waited for `peer` to the deadline: what rank 0 finds out, or
  // this rank's own `complaint` when rank 0 does not answer. Published.
  Failure blame(int peer, const std::string& complaint);
  // Called from another thread when the job fails, unless it has failed already. It replaces an
  // earlier callback, which is not running any more when this returns.
  void on_failure(std::function<void()> callback);

  // Says goodbye and, on rank 0, waits for the others to do so, for at most `timeout`.
  void leave(std::chrono::milliseconds timeout) noexcept;

 private:
  struct Impl;
  explicit Rendezvous(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace trainrt
