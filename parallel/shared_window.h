// Memory that the processes of one group share, all on one host: two areas for each rank, which it
// alone writes, a count of its arrivals, which the others wait for, and a channel of short messages
// from each rank to each other.
//
// It is an unnamed file in memory that the others open through /proc, so nothing of it is left
// behind however its processes end.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace trainrt {

// A count that one process raises and others wait for. New memory, all zero, is a valid one.
struct alignas(64) SharedCounter {
  std::atomic<uint32_t> count;
  std::atomic<uint32_t> num_waiting;

  // What this process has written before is there for who sees the new count.
  void raise();
  bool has_reached(uint32_t wanted) const;
  // False after `timeout`.
  bool wait(uint32_t wanted, std::chrono::milliseconds timeout);
};

struct MessageSlot {
  static constexpr int64_t kInlineBytes = 240;
  int64_t bytes;
  int32_t tag;
  int32_t parcel;  // descriptor, in the sender, of the file that holds a longer message
  std::byte payload[kInlineBytes];
};

// From one rank to another; slot i % kSlots holds message i.
struct Channel {
  static constexpr uint32_t kSlots = 128;
  SharedCounter sent;
  SharedCounter taken;
  MessageSlot slots[kSlots];
};

class SharedWindow {
 public:
  static constexpr int64_t kAreaBytes = int64_t{1} << 20;

  // Null when the system does not allow it.
  static std::unique_ptr<SharedWindow> create(int num_ranks);
  static std::unique_ptr<SharedWindow> open(int64_t process, int64_t descriptor, int num_ranks);
  ~SharedWindow();
  SharedWindow(const SharedWindow&) = delete;
  SharedWindow& operator=(const SharedWindow&) = delete;

  int descriptor() const { return descriptor_; }
  SharedCounter& arrivals(int rank) const;
  // `which` is 0 or 1.
  std::byte* area(int rank, int which) const;
  Channel& channel(int from, int to) const;

 private:
  SharedWindow(int descriptor, int num_ranks, void* memory);

  int descriptor_;
  int num_ranks_;
  std::byte* memory_;
};

}  // namespace trainrt
