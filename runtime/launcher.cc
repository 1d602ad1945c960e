#include "runtime/launcher.h"

#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "graph/base/error.h"
#include "graph/base/log.h"
#include "parallel/thread_communicator.h"

namespace trainrt {

namespace {

bool is_echo(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& caught) {
    return caught.code() == ErrorCode::kCommunication;
  } catch (...) {
    return false;
  }
}

}  // namespace

void run_ranks(int num_ranks,
               double deadline_seconds,
               const std::function<void(int rank, Communicator* world)>& body) {
  if (num_ranks == 1) {
    body(0, nullptr);
    return;
  }
  const auto deadline = std::chrono::milliseconds(static_cast<int64_t>(deadline_seconds * 1000));
  const std::vector<std::unique_ptr<Communicator>> world =
      make_thread_communicators(num_ranks, deadline);
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

}  // namespace trainrt
