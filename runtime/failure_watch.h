// Ends this process when its job has failed and it goes on: while it reads, plans, compiles or
// writes by itself it asks nobody how the others are, for as long as that takes.
#pragma once

#include <thread>

#include "runtime/ranks.h"

namespace trainrt {

class FailureWatch {
 public:
  explicit FailureWatch(const Ranks& ranks);
  // From here on the process ends by itself.
  void stop();

 private:
  std::jthread thread_;
};

}  // namespace trainrt
