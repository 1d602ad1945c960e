#include "runtime/signals.h"

#include <unistd.h>

#include <csignal>
#include <cstring>

namespace trainrt {

namespace {

volatile std::sig_atomic_t g_signal = 0;
volatile std::sig_atomic_t g_deferred = 0;

void handle(int signal) {
  if (g_deferred == 0) {
    constexpr char kText[] = "stopped by a signal before the first step\n";
    const ssize_t written = ::write(STDERR_FILENO, kText, std::strlen(kText));
    static_cast<void>(written);
    ::_exit(128 + signal);
  }
  g_signal = signal;
  std::signal(signal, SIG_DFL);
}

}  // namespace

void catch_stop_signals() {
  std::signal(SIGINT, handle);
  std::signal(SIGTERM, handle);
  if (std::signal(SIGHUP, handle) == SIG_IGN) {
    std::signal(SIGHUP, SIG_IGN);  // started with nohup
  }
  std::signal(SIGPIPE, SIG_IGN);
}

void defer_stop_signals() {
  g_deferred = 1;
}

int stop_signal() {
  return g_signal;
}

}  // namespace trainrt
