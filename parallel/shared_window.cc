#include "parallel/shared_window.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <ctime>

#include "graph/base/error.h"

namespace trainrt {

namespace {

// Enough for a rank that is about to arrive, and nothing for one that needs this core to do so.
constexpr int kSpins = 500;

// One per rank, each in a cache line of its own. New memory is zero.
struct alignas(64) Arrivals {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> num_waiting;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(Arrivals) == 64);

size_t window_bytes(int num_ranks) {
  return static_cast<size_t>(num_ranks) *
         (sizeof(Arrivals) + 2 * static_cast<size_t>(SharedWindow::kAreaBytes));
}

Arrivals& arrivals_of(std::byte* memory, int rank) {
  return reinterpret_cast<Arrivals*>(memory)[rank];
}

bool has_come(const Arrivals& arrivals, uint32_t wanted) {
  return static_cast<int32_t>(arrivals.count.load(std::memory_order_acquire) - wanted) >= 0;
}

void* map(int descriptor, int num_ranks) {
  void* memory =
      ::mmap(nullptr, window_bytes(num_ranks), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

}  // namespace

SharedWindow::SharedWindow(int descriptor, int num_ranks, void* memory)
    : descriptor_(descriptor), num_ranks_(num_ranks), memory_(static_cast<std::byte*>(memory)) {}

SharedWindow::~SharedWindow() {
  ::munmap(memory_, window_bytes(num_ranks_));
  ::close(descriptor_);
}

std::unique_ptr<SharedWindow> SharedWindow::create(int num_ranks) {
  const int descriptor = ::memfd_create("trainrt", MFD_CLOEXEC);
  if (descriptor < 0) {
    return nullptr;
  }
  void* memory = ::ftruncate(descriptor, static_cast<off_t>(window_bytes(num_ranks))) == 0
                     ? map(descriptor, num_ranks)
                     : nullptr;
  if (memory == nullptr) {
    ::close(descriptor);
    return nullptr;
  }
  return std::unique_ptr<SharedWindow>(new SharedWindow(descriptor, num_ranks, memory));
}

std::unique_ptr<SharedWindow> SharedWindow::open(int64_t process,
                                                 int64_t descriptor,
                                                 int num_ranks) {
  const std::string path = concat("/proc/", process, "/fd/", descriptor);
  const int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  void* memory = own < 0 ? nullptr : map(own, num_ranks);
  if (memory == nullptr) {
    ::close(own);
    return nullptr;
  }
  return std::unique_ptr<SharedWindow>(new SharedWindow(own, num_ranks, memory));
}

std::byte* SharedWindow::area(int rank, int which) const {
  return memory_ + static_cast<size_t>(num_ranks_) * sizeof(Arrivals) +
         (2 * rank + which) * kAreaBytes;
}

void SharedWindow::arrive(int rank) {
  Arrivals& own = arrivals_of(memory_, rank);
  own.count.fetch_add(1);
  if (own.num_waiting.load() > 0) {
    ::syscall(SYS_futex, &own.count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool SharedWindow::wait(int rank, uint32_t wanted, std::chrono::milliseconds timeout) const {
  Arrivals& other = arrivals_of(memory_, rank);
  for (int i = 0; i < kSpins; ++i) {
    if (has_come(other, wanted)) {
      return true;
    }
    __builtin_ia32_pause();
  }
  // Announced before the count is read again, so that either this rank sees the arrival or the
  // arriving one sees that it has to wake.
  other.num_waiting.fetch_add(1);
  const uint32_t seen = other.count.load();
  if (static_cast<int32_t>(seen - wanted) < 0) {
    const timespec time{timeout.count() / 1000, timeout.count() % 1000 * 1000000};
    ::syscall(SYS_futex, &other.count, FUTEX_WAIT, seen, &time, nullptr, 0);
  }
  other.num_waiting.fetch_sub(1);
  return has_come(other, wanted);
}

}  // namespace trainrt
