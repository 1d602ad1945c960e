// Memory that the processes of one group share, all on one host: two areas for each rank, which it
// alone writes, and a count of its arrivals, which the others wait for.
//
// It is an unnamed file in memory that the others open through /proc, so nothing of it is left
// behind however its processes end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace trainrt {

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
  // `which` is 0 or 1.
  std::byte* area(int rank, int which) const;

  // All that this rank has written so far is there for who sees the arrival.
  void arrive(int rank);
  // Waits until `rank` has arrived `arrivals` times; false after `timeout`.
  bool wait(int rank, uint32_t arrivals, std::chrono::milliseconds timeout) const;

 private:
  SharedWindow(int descriptor, int num_ranks, void* memory);

  int descriptor_;
  int num_ranks_;
  std::byte* memory_;
};

}  // namespace trainrt
