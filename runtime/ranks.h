// The ranks that this process runs: all of a run's, as threads, or one of several processes'. Each
// of several GPUs has a process.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/rendezvous.h"
#include "runtime/launcher.h"
#include "runtime/options.h"

namespace trainrt {

class Ranks {
 public:
  // Without a place this process is alone; with one it meets the others. Throws what
  // Rendezvous::join does.
  Ranks(const std::optional<RankPlace>& place, double deadline_seconds);

  int num_processes() const { return rendezvous_ ? rendezvous_->world_size() : 1; }
  std::vector<std::string> hosts() const;  // of several processes, by rank
  // The only rank of this process; nothing when it runs all of them.
  std::optional<int> only_rank() const;
  // Rank 0 prints, and writes what is written once.
  bool has_rank_zero() const { return only_rank().value_or(0) == 0; }

  // What the other processes are told that this one does, should it die.
  void set_activity(const std::string& doing);
  // Why the job has failed, be it another process or this one.
  std::optional<Failure> failure() const;

  // Every process's `own`, by rank; `what` says what it is for. Collective.
  std::vector<std::string> exchange(const std::string& what, const std::string& own);
  // Throws kInvalidArgument when processes were started with different things. Collective.
  void agree(const Facts& facts);
  // Throws kInvalidArgument when two processes of a machine have the same of something, as a GPU
  // that only one may have. Collective.
  void differ(const std::string& what, const std::string& own);

  // Calls body(rank, world) for every rank of this process; a run of one rank has no communicator.
  // A rank that fails releases the others; the first failure is rethrown, preferably one that is
  // not the echo of another's.
  void run(int num_ranks, const std::function<void(int rank, Communicator* world)>& body);

  // Tells the other processes that this one fails, or that it is done, and waits for rank 0 to have
  // told all.
  void leave_failed(ErrorCode code, const std::string& why) noexcept;
  void leave() noexcept;

 private:
  void run_threads(int num_ranks,
                   const std::function<void(int rank, Communicator* world)>& body) const;

  std::chrono::milliseconds deadline_;
  std::shared_ptr<Rendezvous> rendezvous_;
};

// Who is to start this run's processes, or has done so: a launcher, or this program, as --nproc
// says or for as many GPUs as the plan or cluster has devices. Nothing where this process is all.
// Throws kInvalidArgument, and kInfeasiblePlan where the GPUs are too few.
std::optional<Launch> choose_launch(const Options& options, const Environment& environment);

// Runs `body` in every process of the run and returns its exit code: starts them, or takes the
// place that a launcher has given to this one.
int with_ranks(const Options& options, const std::function<int(Ranks&)>& body);

// Tells the other processes of this one's job that it ends with `error` before it has met them, if
// a launcher says that it has any; they need not wait for it then.
void decline_rank(const Error& error) noexcept;

}  // namespace trainrt
