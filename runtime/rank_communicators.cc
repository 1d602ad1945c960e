#include "runtime/rank_communicators.h"

#include <thread>
#include <vector>

#include "graph/base/error.h"

namespace trainrt {

Communicator& RankCommunicators::of_tensors(const std::string& name) const {
  if (const auto at = on_device.find(name); at != on_device.end()) {
    return *at->second;
  }
  Communicator* found = name == "data"       ? data
                        : name == "tensor"   ? tensor
                        : name == "pipeline" ? pipeline
                        : name == "world"    ? world
                                             : nullptr;
  TRAINRT_CHECK(found != nullptr, "no communicator for group '", name, "' on this rank");
  return *found;
}

void RankCommunicators::require_alive() const {
  for (const auto& [name, communicator] : on_device) {
    const std::string failure = communicator->failure();
    TRAINRT_REQUIRE(failure.empty(), kCommunication, failure);
  }
}

// All at once: giving one up waits for what its device has to do, which may be another one's call.
void RankCommunicators::abort(const std::string& reason) const {
  std::vector<std::thread> threads;
  for (const auto& [name, communicator] : on_device) {
    threads.emplace_back([&reason, communicator = communicator] { communicator->abort(reason); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace trainrt
