#include "parallel/shared_window.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

#include "parallel/memory_file.h"

namespace trainrt {

namespace {

// Enough for a rank that is about to arrive, and nothing for one that needs this core to do so.
constexpr int kSpins = 500;

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(SharedCounter) == 64);

int64_t window_bytes(int64_t num_ranks) {
  return num_ranks * (static_cast<int64_t>(sizeof(SharedCounter)) + 2 * SharedWindow::kAreaBytes +
                      num_ranks * static_cast<int64_t>(sizeof(Channel)));
}

}  // namespace

void SharedCounter::raise() {
  count.fetch_add(1);
  if (num_waiting.load() > 0) {
    ::syscall(SYS_futex, &count, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool SharedCounter::has_reached(uint32_t wanted) const {
  return static_cast<int32_t>(count.load(std::memory_order_acquire) - wanted) >= 0;
}

bool SharedCounter::wait(uint32_t wanted, std::chrono::milliseconds timeout) {
  for (int i = 0; i < kSpins; ++i) {
    if (has_reached(wanted)) {
      return true;
    }
    __builtin_ia32_pause();
  }
  // Announced before the count is read again, so that either this process sees the new count or the
  // one that raises it sees that it has to wake.
  num_waiting.fetch_add(1);
  const uint32_t seen = count.load();
  if (static_cast<int32_t>(seen - wanted) < 0) {
    const timespec time{timeout.count() / 1000, timeout.count() % 1000 * 1000000};
    ::syscall(SYS_futex, &count, FUTEX_WAIT, seen, &time, nullptr, 0);
  }
  num_waiting.fetch_sub(1);
  return has_reached(wanted);
}

SharedWindow::SharedWindow(int descriptor, int num_ranks, void* memory)
    : descriptor_(descriptor), num_ranks_(num_ranks), memory_(static_cast<std::byte*>(memory)) {}

SharedWindow::~SharedWindow() {
  ::munmap(memory_, static_cast<size_t>(window_bytes(num_ranks_)));
  ::close(descriptor_);
}

std::unique_ptr<SharedWindow> SharedWindow::create(int num_ranks) {
  const std::optional<MemoryFile> file = create_memory_file(window_bytes(num_ranks));
  return file ? std::unique_ptr<SharedWindow>(
                    new SharedWindow(file->descriptor, num_ranks, file->memory))
              : nullptr;
}

std::unique_ptr<SharedWindow> SharedWindow::open(int64_t process,
                                                 int64_t descriptor,
                                                 int num_ranks) {
  const std::optional<MemoryFile> file =
      open_memory_file(process, descriptor, window_bytes(num_ranks));
  return file ? std::unique_ptr<SharedWindow>(
                    new SharedWindow(file->descriptor, num_ranks, file->memory))
              : nullptr;
}

SharedCounter& SharedWindow::arrivals(int rank) const {
  return reinterpret_cast<SharedCounter*>(memory_)[rank];
}

std::byte* SharedWindow::area(int rank, int which) const {
  return memory_ + static_cast<int64_t>(sizeof(SharedCounter)) * num_ranks_ +
         (2 * rank + which) * kAreaBytes;
}

Channel& SharedWindow::channel(int from, int to) const {
  std::byte* first = area(num_ranks_, 0);
  return reinterpret_cast<Channel*>(first)[from * num_ranks_ + to];
}

}  // namespace trainrt
