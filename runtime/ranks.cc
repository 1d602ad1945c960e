#include "runtime/ranks.h"

#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "graph/base/log.h"
#include "parallel/cluster_file.h"
#include "parallel/gloo_communicator.h"
#include "parallel/thread_communicator.h"
#include "runtime/failure_watch.h"
#include "runtime/given_plan.h"
#include "runtime/load_cuda.h"
#include "runtime/local_ranks.h"
#include "runtime/rank_devices.h"

namespace trainrt {

namespace {

// The others were started when this process was, and come soon or not at all.
constexpr std::chrono::milliseconds kDeclineTimeout{3000};

std::string failed(int rank, const std::string& why) {
  return concat("rank ", rank, " failed: ", why);
}

bool is_echo(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& caught) {
    return caught.code() == ErrorCode::kCommunication;
  } catch (...) {
    return false;
  }
}

// Threads would wait for each other for ever: a rank that allocates memory waits for the kernels of
// GPUs that have its own mapped, which may be waiting for that rank (NVIDIA/nccl#787). What is
// wrong with the flags is told here, once.
int num_gpu_processes(const Options& options) {
  if (!names_cuda(options.devices) || options.gpus_in_threads) {
    return 1;
  }
  const int num_gpus = static_cast<int>(run_devices(options, {}).size());
  if (num_gpus == 1) {
    return 1;
  }
  const std::optional<GivenPlan> given = plan_file(options);
  const bool has_plan = given && given->is_whole();
  const int wanted = has_plan                  ? given->plan.world_size()
                     : options.cluster.empty() ? num_gpus
                                               : load_cluster(options.cluster).num_devices();
  TRAINRT_REQUIRE(wanted <= num_gpus,
                  kInfeasiblePlan,
                  has_plan ? given->where : "--cluster " + options.cluster,
                  " is for ",
                  wanted,
                  " devices, and --devices ",
                  options.devices,
                  " are ",
                  num_gpus,
                  " GPUs");
  return wanted;
}

}  // namespace

Ranks::Ranks(const std::optional<RankPlace>& place, double deadline_seconds)
    : deadline_(static_cast<int64_t>(deadline_seconds * 1000)) {
  if (!place) {
    return;
  }
  set_log_prefix(concat("[rank ", place->rank, "] "));
  if (place->rank != 0) {
    set_log_level(LogLevel::kWarning);
  }
  rendezvous_ = Rendezvous::join(*place, deadline_);
}

std::optional<int> Ranks::only_rank() const {
  return rendezvous_ ? std::optional<int>(rendezvous_->rank()) : std::nullopt;
}

std::vector<std::string> Ranks::hosts() const {
  std::vector<std::string> hosts;
  for (int rank = 0; rendezvous_ && rank < rendezvous_->world_size(); ++rank) {
    hosts.push_back(rendezvous_->host_of(rank));
  }
  return hosts;
}

void Ranks::set_activity(const std::string& doing) {
  if (rendezvous_) {
    rendezvous_->set_activity(doing, -1);
  }
}

std::optional<Failure> Ranks::failure() const {
  return rendezvous_ ? rendezvous_->failure() : std::nullopt;
}

std::vector<std::string> Ranks::exchange(const std::string& what, const std::string& own) {
  return rendezvous_ ? rendezvous_->exchange(what, own) : std::vector<std::string>{own};
}

void Ranks::differ(const std::string& what, const std::string& own) {
  if (!rendezvous_) {
    return;
  }
  const std::string host = rendezvous_->host_of(rendezvous_->rank());
  std::map<std::string, size_t> first;  // rank with it
  const std::vector<std::string> all = rendezvous_->exchange(what, host + " " + own);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto [at, is_new] = first.try_emplace(all[rank], rank);
    TRAINRT_REQUIRE(is_new,
                    kInvalidArgument,
                    "ranks ",
                    at->second,
                    " and ",
                    rank,
                    " have the same ",
                    what,
                    "; each process needs one of its own");
  }
}

void Ranks::agree(const Facts& facts) {
  if (rendezvous_) {
    rendezvous_->agree(facts);
  }
}

void Ranks::run(int num_ranks, const std::function<void(int rank, Communicator* world)>& body) {
  if (rendezvous_) {
    TRAINRT_CHECK(num_ranks == num_processes());
    const std::unique_ptr<Communicator> world = make_gloo_communicator(rendezvous_);
    body(rendezvous_->rank(), world.get());
  } else if (num_ranks == 1) {
    body(0, nullptr);
  } else {
    run_threads(num_ranks, body);
  }
}

void Ranks::run_threads(int num_ranks,
                        const std::function<void(int rank, Communicator* world)>& body) const {
  const std::vector<std::unique_ptr<Communicator>> world =
      make_thread_communicators(num_ranks, deadline_);
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      set_log_prefix(concat("[rank ", rank, "] "));
      Communicator& own = *world[static_cast<size_t>(rank)];
      std::string reason;
      std::exception_ptr error;
      try {
        body(rank, &own);
        return;
      } catch (const std::exception& caught) {
        reason = caught.what();
        error = std::current_exception();
      }
      own.abort(reason);
      const std::lock_guard lock(mutex);
      if (!first || (is_echo(first) && !is_echo(error))) {
        first = error;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

void Ranks::leave_failed(ErrorCode code, const std::string& why) noexcept {
  if (rendezvous_) {
    const int rank = rendezvous_->rank();
    rendezvous_->publish({rank, code, failed(rank, why)});
    rendezvous_->leave(kNoticeTimeout);
  }
}

void Ranks::leave() noexcept {
  if (rendezvous_) {
    rendezvous_->leave(deadline_);
  }
}

std::optional<Launch> choose_launch(const Options& options, const Environment& environment) {
  std::optional<Launch> launch = find_launch(environment);
  const bool started_by_us = launch && launch->launcher == "trainrt";
  TRAINRT_REQUIRE(!launch || started_by_us || options.nproc == 1,
                  kInvalidArgument,
                  "--nproc ",
                  options.nproc,
                  " starts ranks, but ",
                  launch ? launch->launcher : "",
                  " has started this process as one of several already; leave --nproc out");
  if (launch) {
    return launch;
  }
  const int num_processes =
      options.nproc > 1 ? static_cast<int>(options.nproc) : num_gpu_processes(options);
  return num_processes > 1 ? std::optional(local_launch(num_processes)) : std::nullopt;
}

int with_ranks(const Options& options, const std::function<int(Ranks&)>& body) {
  if (options.deterministic && names_cuda(options.devices)) {
    keep_sums_in_order();
  }
  const std::optional<Launch> launch = choose_launch(options, process_environment());
  if (launch && launch->num_local > 1) {
    return run_local_ranks(*launch);
  }
  Ranks ranks(launch ? std::optional<RankPlace>(launch->place) : std::nullopt, options.deadline);
  FailureWatch watch(ranks, launch && launch->ends_with_parent);
  const auto tell = [&](ErrorCode code, const std::string& why) {
    watch.stop();
    ranks.leave_failed(code, why);
  };
  try {
    const int code = body(ranks);
    watch.stop();
    ranks.leave();
    return code;
  } catch (const Error& error) {
    tell(error.code(), error.what());
    throw;
  } catch (const std::bad_alloc&) {
    tell(ErrorCode::kOutOfMemory, "its host ran out of memory");
    throw;
  } catch (const std::exception& error) {
    tell(ErrorCode::kInternal, error.what());
    throw;
  }
}

void decline_rank(const Error& error) noexcept {
  try {
    const std::optional<Launch> launch = find_launch(process_environment());
    if (launch && launch->num_local == 1) {
      const int rank = launch->place.rank;
      Rendezvous::decline(
          launch->place, {rank, error.code(), failed(rank, error.what())}, kDeclineTimeout);
    }
  } catch (...) {  // nothing says which rank this is
  }
}

}  // namespace trainrt
