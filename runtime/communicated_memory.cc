#include "runtime/communicated_memory.h"

#include <algorithm>

namespace trainrt {

namespace {

bool conflict(const MemoryUse& a, const MemoryUse& b) {
  return (a.writes || b.writes) && a.memory.data() < b.memory.data() + b.memory.size() &&
         b.memory.data() < a.memory.data() + a.memory.size();
}

}  // namespace

void CommunicatedMemory::begin(Lane lane, const std::vector<MemoryUse>& uses) {
  device_.follow(lane, Lane::kCompute);
  for (const Communication& other : under_way_) {
    const bool meets =
        other.lane != lane && std::any_of(uses.begin(), uses.end(), [&](const MemoryUse& use) {
          return conflict(use, other.use);
        });
    if (meets) {
      device_.follow(lane, other.mark);
    }
  }
}

void CommunicatedMemory::end(Lane lane, const std::vector<MemoryUse>& uses) {
  const LaneMark mark = device_.mark(lane);
  if (mark == nullptr) {
    return;
  }
  for (const MemoryUse& use : uses) {
    if (!use.memory.empty()) {
      under_way_.push_back({use, lane, next_number_, mark});
    }
  }
  ++next_number_;
}

void CommunicatedMemory::await(const MemoryUse& use) {
  // The last first: what a lane did before it is then done, too.
  for (size_t i = under_way_.size(); i-- > 0;) {
    if (i < under_way_.size() && conflict(use, under_way_[i].use)) {
      compute_after(Communication(under_way_[i]));
    }
  }
}

void CommunicatedMemory::await(const void* data, int64_t bytes, bool writes) {
  // As a span of what may be written; nothing is.
  std::byte* begin = static_cast<std::byte*>(const_cast<void*>(data));
  await({{begin, static_cast<size_t>(bytes)}, writes});
}

void CommunicatedMemory::await_all() {
  while (!under_way_.empty()) {
    compute_after(Communication(under_way_.back()));
  }
}

void CommunicatedMemory::compute_after(const Communication& communication) {
  device_.follow(Lane::kCompute, communication.mark);
  under_way_.erase(std::remove_if(under_way_.begin(),
                                  under_way_.end(),
                                  [&](const Communication& earlier) {
                                    return earlier.lane == communication.lane &&
                                           earlier.number <= communication.number;
                                  }),
                   under_way_.end());
}

}  // namespace trainrt
