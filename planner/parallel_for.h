// Independent pieces of the planner's work, on all cores of the machine. What comes of them must
// not depend on how many there are: each writes where no other does.
#pragma once

#include <cstddef>
#include <functional>

namespace trainrt {

// Calls fn(i, worker) once for each i in [0, count), begun in ascending order. `worker`, below
// most_workers(): of two calls at a time each has its own, so what a call remembers may be kept by
// worker. Loops may be nested. When calls throw, the exception of the lowest i is thrown.
void parallel_for(size_t count, const std::function<void(size_t i, size_t worker)>& fn);

size_t most_workers();

// Until it goes: no more threads than `most`, which is for tests.
class WorkerLimit {
 public:
  explicit WorkerLimit(size_t most);
  ~WorkerLimit();
  WorkerLimit(const WorkerLimit&) = delete;
  WorkerLimit& operator=(const WorkerLimit&) = delete;

 private:
  size_t before_;
};

}  // namespace trainrt
