// The memory that communication under way works on.
//
// Communication begins when all earlier computation is done, and computation goes on beside it
// until it touches memory that communication works on. Memory is compared by address, not tensors
// by name: the plan lays tensors over each other. On a CPU, where communication is over when its
// call returns, there is never any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/device.h"

namespace trainrt {

struct MemoryUse {
  std::span<std::byte> memory;
  bool writes = false;
};

class CommunicatedMemory {
 public:
  explicit CommunicatedMemory(Device& device) : device_(device) {}

  // What is asked of `lane` from now on runs after all computation so far, and after what other
  // lanes do with this memory; end() says that it has been asked.
  void begin(Lane lane, const std::vector<MemoryUse>& uses);
  void end(Lane lane, const std::vector<MemoryUse>& uses);

  // Computation from now on may use this memory: it runs after the communication that writes there,
  // or reads what is to be written.
  void await(const MemoryUse& use);
  void await(const void* data, int64_t bytes, bool writes);
  void await_all();

 private:
  struct Communication {
    MemoryUse use;
    Lane lane;
    int64_t number;  // of the call
    LaneMark mark;
  };
  void compute_after(const Communication& communication);

  Device& device_;
  std::vector<Communication> under_way_;  // by number
  int64_t next_number_ = 0;
};

}  // namespace trainrt
