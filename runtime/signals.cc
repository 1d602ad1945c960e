#include "runtime/signals.h"

#include <csignal>

namespace trainrt {

namespace {

volatile std::sig_atomic_t g_signal = 0;

void remember(int signal) {
  g_signal = signal;
  std::signal(signal, SIG_DFL);
}

}  // namespace

void catch_stop_signals() {
  std::signal(SIGINT, remember);
  std::signal(SIGTERM, remember);
  std::signal(SIGPIPE, SIG_IGN);  // a closed stdout is an I/O error, not a death
}

int stop_signal() {
  return g_signal;
}

}  // namespace trainrt
