// Ends this process when its job has failed and it goes on: while it reads, plans, compiles or
// writes by itself it asks nobody how the others are, for as long as that takes. And asks it to
// stop, as SIGTERM does, when the launcher whose child it is has died and could not.
#pragma once

#include <thread>

#include "runtime/ranks.h"

namespace trainrt {

class FailureWatch {
 public:
  FailureWatch(const Ranks& ranks, bool ends_with_parent);
  // From here on the process ends by itself.
  void stop();

 private:
  std::jthread thread_;
};

}  // namespace trainrt
