#include "runtime/thread_waiting.h"

#include <unistd.h>

#include <cstdlib>

namespace trainrt {

namespace {

constexpr const char* kSpinCount = "3000";  // rounds; some 30 microseconds

}  // namespace

void limit_spinning(char** argv) {
  if (std::getenv("GOMP_SPINCOUNT") != nullptr || std::getenv("OMP_WAIT_POLICY") != nullptr) {
    return;
  }
  if (::setenv("GOMP_SPINCOUNT", kSpinCount, 0) == 0) {
    ::execv("/proc/self/exe", argv);
  }
}

}  // namespace trainrt
