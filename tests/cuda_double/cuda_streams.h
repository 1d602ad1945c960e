// The streams of the double: queues of work, ordered by events and by meetings of several streams.
// Everything here is called under `Lock`.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

struct CUgraph_st {
  std::vector<std::function<void()>> work;  // in order
};

// What an event was last recorded in: who waits for it waits for that, whatever comes later.
struct EventRecord {
  std::shared_ptr<CUstream_st> stream;
  bool done = false;
};

struct CUevent_st {
  int device = 0;
  bool timed = false;
  bool captured = false;                // recorded in a capture, and so unknown outside of it
  std::shared_ptr<EventRecord> record;  // null: none

  bool is_done() const { return record == nullptr || record->done; }
};

namespace cuda_double {

std::recursive_mutex& mutex();
class Lock {
 public:
  Lock() : guard_(mutex()) {}

 private:
  std::lock_guard<std::recursive_mutex> guard_;
};

// A piece of work that several streams, perhaps of other threads, must reach before it runs, once.
struct Meeting {
  int missing = 0;  // streams that have not reached it
  bool done = false;
  bool broken = false;  // nobody will ever carry it out
  std::function<void()> work;
};

struct Op {
  enum class Kind { kWork, kRecord, kWait, kMeet };
  Kind kind = Kind::kWork;
  std::function<void()> work;
  std::shared_ptr<EventRecord> record;
  // The stream goes on when all have taken place, or when `given_up` says so.
  std::vector<std::shared_ptr<Meeting>> meetings;
  std::shared_ptr<const bool> given_up;
  bool arrived = false;
};

// A stream that records what it is asked for.
struct Capture {
  CUgraph_st graph;
  std::thread::id thread;  // that began it
  bool invalid = false;    // something was asked for that cannot be recorded
};

}  // namespace cuda_double

struct CUstream_st {
  int device = 0;
  std::shared_ptr<cuda_double::Capture> capture;
  bool destroyed = false;  // by its owner: gone when its queue is empty
  std::deque<cuda_double::Op> queue;
};

namespace cuda_double {

std::mt19937_64& generator();
void reset_streams(uint64_t seed);

std::shared_ptr<CUstream_st> add_stream(int device);
// Whether the calling thread captures: it may then wait for nothing, nor allocate. The capture is
// lost by the attempt.
bool breaks_capture();
// Null for one that is not there, or destroyed.
std::shared_ptr<CUstream_st> find_stream(cudaStream_t stream);
void destroy_stream(CUstream_st& stream);

// Runs work of streams until `done`, for a thread that waits for `goal`. Gives the lock away while
// nothing can run. Ends the program when that lasts.
void run_until(CUstream_st& goal, const std::function<bool()>& done);
void run_until_empty(CUstream_st& stream);
void drain(int device);
bool communicates(int device);  // one of its streams meets others, or is to
void run_some();                // as a device does beside a host that asks

// Waits, without the lock, a moment for other threads; `waited` counts the moments of one wait.
void wait_for_others(const char* what, int& waited);

}  // namespace cuda_double
