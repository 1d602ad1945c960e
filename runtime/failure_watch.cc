#include "runtime/failure_watch.h"

#include <signal.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "graph/base/log.h"

namespace trainrt {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLook{100};
// For a rank that does wait for another, and can say at what.
constexpr milliseconds kGrace{500};

// As main() does, but from another thread and whatever the others hold.
[[noreturn]] void end_process(const Failure& failure) {
  log_message(LogLevel::kError, failure.message);
  if (::ftrylockfile(stdout) == 0) {
    std::fflush(stdout);
  }
  std::_Exit(exit_code(failure.code));
}

}  // namespace

FailureWatch::FailureWatch(const Ranks& ranks, bool ends_with_parent) {
  const std::optional<int> rank = ranks.only_rank();
  if (!rank) {
    return;
  }
  const pid_t parent = ends_with_parent ? ::getppid() : 0;
  thread_ = std::jthread([&ranks, rank = *rank, parent](const std::stop_token& stopped) {
    set_log_prefix(concat("[rank ", rank, "] "));
    std::mutex mutex;
    std::condition_variable_any changed;
    std::unique_lock lock(mutex);
    const auto wait = [&](milliseconds time) {
      changed.wait_for(lock, stopped, time, [] { return false; });
      return !stopped.stop_requested();
    };
    for (bool has_parent = parent != 0; wait(kLook);) {
      if (has_parent && ::getppid() != parent) {
        has_parent = false;
        log_warning("the launcher that started this rank, process ",
                    parent,
                    ", is gone; stopping as on SIGTERM");
        ::kill(::getpid(), SIGTERM);
      }
      if (const std::optional<Failure> failure = ranks.failure(); failure && wait(kGrace)) {
        end_process(*failure);
      }
    }
  });
}

void FailureWatch::stop() {
  thread_ = std::jthread();
}

}  // namespace trainrt
