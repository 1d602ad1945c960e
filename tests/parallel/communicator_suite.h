// The facts every communicator must satisfy, as one suite over implementations: ranks are threads
// of the test whatever the transport is.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "parallel/communicator.h"

namespace trainrt {

struct CommunicatorKind {
  std::string name;
  std::function<std::vector<std::unique_ptr<Communicator>>(int world_size,
                                                           std::chrono::milliseconds deadline)>
      make;
};

// Runs fn(communicator) on a thread per rank; the message of what each rank threw, "" if nothing.
std::vector<std::string> run_ranks(const CommunicatorKind& kind,
                                   int world_size,
                                   std::chrono::milliseconds deadline,
                                   const std::function<void(Communicator&)>& fn);

}  // namespace trainrt
