// The CUDA runtime of the double: devices, memory, streams, events and graphs.
//
// A stream is a queue. To bring something about (an event, the end of a stream) the waiting thread
// picks, by a generator with the test's seed, one stream after another whose head can run, and runs
// that head, until it has happened. Three moods, changed at random, decide who is picked: anybody,
// those whom nobody waits for first, or only those who must run.
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/cuda_double/cuda_double.h"

struct CUstream_st;
struct CUevent_st;

namespace {

enum class OpKind { kWork, kRecord, kWait, kMeet };

struct Op {
  OpKind kind = OpKind::kWork;
  std::function<void()> work;
  CUevent_st* event = nullptr;
  int64_t ticket = 0;  // which record of the event
  std::shared_ptr<cuda_double::Rendezvous> rendezvous = nullptr;
  bool arrived = false;
};

}  // namespace

struct CUevent_st {
  int64_t recorded = 0;   // records asked for
  int64_t completed = 0;  // records that have run
  CUstream_st* stream = nullptr;
};

struct CUgraph_st {
  std::vector<std::function<void()>> work;
};

struct CUgraphExec_st {
  std::vector<std::function<void()>> work;
};

struct CUstream_st {
  int device = 0;
  std::deque<Op> queue;
  CUgraph_st* capture = nullptr;
};

namespace {

struct Allocation {
  int device = 0;
  size_t bytes = 0;
  std::byte* base = nullptr;  // of the mapping, guard pages included
  size_t mapped = 0;
  bool host = false;
};

constexpr unsigned char kCanary = 0xa5;

struct State {
  std::recursive_mutex mutex;
  cuda_double::Options options;
  std::mt19937_64 generator{0};
  std::map<const std::byte*, Allocation> memory;  // by first byte
  std::set<CUstream_st*> streams;
  std::set<CUevent_st*> events;
  std::map<std::string, int> alive;
  std::vector<size_t> used;
  int64_t calls = 0, fail_at = 0, waits = 0, launches = 0;
  std::string failed;
  int running = 0;  // depth of work that may touch device memory
  int mood = 0;
};

State& state() {
  static State instance;
  return instance;
}

thread_local int thread_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

using Lock = std::lock_guard<std::recursive_mutex>;

cudaError_t result(cudaError_t code) {
  if (code != cudaSuccess) {
    last_error = code;
  }
  return code;
}

size_t page() {
  return static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

void protect_all(int protection) {
  for (const auto& [data, allocation] : state().memory) {
    if (!allocation.host) {
      mprotect(allocation.base + page(), allocation.mapped - 2 * page(), protection);
    }
  }
}

// Device memory may be touched while one lives.
class Running {
 public:
  Running() {
    if (state().running++ == 0) {
      protect_all(PROT_READ | PROT_WRITE);
    }
  }
  ~Running() {
    if (--state().running == 0) {
      protect_all(PROT_NONE);
    }
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
};

bool can_run(CUstream_st& stream) {
  if (stream.queue.empty()) {
    return false;
  }
  Op& head = stream.queue.front();
  if (head.kind == OpKind::kMeet) {
    cuda_double::Rendezvous& meeting = *head.rendezvous;
    if (!head.arrived) {
      head.arrived = true;
      --meeting.missing;
    }
    return meeting.missing == 0 || (meeting.aborted != nullptr && *meeting.aborted);
  }
  return head.kind != OpKind::kWait || head.event->completed >= head.ticket;
}

void run_head(CUstream_st& stream) {
  Op op = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (op.kind == OpKind::kMeet) {
    const bool aborted = op.rendezvous->aborted != nullptr && *op.rendezvous->aborted;
    if (!op.rendezvous->done && !aborted) {
      op.rendezvous->done = true;
      const Running running;
      op.work();
    }
  } else if (op.kind == OpKind::kRecord) {
    op.event->completed = std::max(op.event->completed, op.ticket);
  } else if (op.kind == OpKind::kWork) {
    const Running running;
    op.work();
  }
}

// The streams that must move for `stream` to move: itself, or who records what its head waits for.
CUstream_st* blocking(CUstream_st* stream) {
  for (size_t depth = 0; depth <= state().streams.size(); ++depth) {
    if (can_run(*stream) || stream->queue.empty()) {
      return stream;
    }
    if (stream->queue.front().kind != OpKind::kWait) {
      return nullptr;  // it meets others
    }
    stream = stream->queue.front().event->stream;
  }
  return nullptr;
}

// Runs heads until `done`. `goal` is the stream that is waited for. False: nothing can run, ever.
template <typename Done>
bool run_until(CUstream_st* goal, const Done& done) {
  State& s = state();
  int idle = 0;
  while (!done()) {
    if (s.generator() % 8 == 0) {
      s.mood = static_cast<int>(s.generator() % 3);
    }
    std::vector<CUstream_st*> ready, others;
    for (CUstream_st* stream : s.streams) {
      if (can_run(*stream)) {
        ready.push_back(stream);
        if (stream != goal) {
          others.push_back(stream);
        }
      }
    }
    CUstream_st* needed = blocking(goal);
    CUstream_st* pick = nullptr;
    if (s.mood == 2 && needed != nullptr && can_run(*needed)) {
      pick = needed;
    } else if (s.mood == 1 && !others.empty()) {
      pick = others[s.generator() % others.size()];
    } else if (!ready.empty()) {
      pick = ready[s.generator() % ready.size()];
    }
    if (pick == nullptr) {
      // Somebody else's thread may have to queue its part of a meeting first.
      const bool meets = std::any_of(s.streams.begin(), s.streams.end(), [](CUstream_st* stream) {
        return !stream->queue.empty() && stream->queue.front().kind == OpKind::kMeet;
      });
      if (!meets || ++idle > 30000) {
        return false;
      }
      s.mutex.unlock();
      cuda_double::sleep_ms(1);
      s.mutex.lock();
      continue;
    }
    run_head(*pick);
  }
  return true;
}

void run_some() {
  State& s = state();
  for (CUstream_st* stream : s.streams) {
    if (can_run(*stream) && s.generator() % 2 == 0) {
      run_head(*stream);
    }
  }
}

void drain() {
  for (CUstream_st* stream : state().streams) {
    run_until(stream, [&] { return stream->queue.empty(); });
  }
}

const Allocation* find(const void* data, size_t bytes) {
  const std::byte* at = static_cast<const std::byte*>(data);
  auto next = state().memory.upper_bound(at);
  if (next == state().memory.begin()) {
    return nullptr;
  }
  --next;
  return at + bytes <= next->first + next->second.bytes ? &next->second : nullptr;
}

cudaError_t allocate(void** to, size_t bytes, bool host) {
  State& s = state();
  const size_t slack_free = (std::max<size_t>(bytes, 1) + 255) / 256 * 256;
  const size_t body = (slack_free + page() - 1) / page() * page();
  void* base = mmap(nullptr, body + 2 * page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    return cudaErrorMemoryAllocation;
  }
  std::byte* first = static_cast<std::byte*>(base) + page();
  mprotect(first, body, PROT_READ | PROT_WRITE);
  std::byte* data = first + body - slack_free;  // ends at the guard page
  std::memset(data, host ? 0 : 0xff, bytes);
  std::memset(data + bytes, kCanary, slack_free - bytes);
  s.memory[data] = {thread_device, bytes, static_cast<std::byte*>(base), body + 2 * page(), host};
  if (!host) {
    s.used[static_cast<size_t>(thread_device)] += bytes;
    if (s.running == 0) {
      mprotect(first, body, PROT_NONE);
    }
  }
  *to = data;
  return cudaSuccess;
}

cudaError_t release(void* data, bool host) {
  State& s = state();
  const auto at = s.memory.find(static_cast<std::byte*>(data));
  if (at == s.memory.end() || at->second.host != host) {
    return cudaErrorInvalidValue;
  }
  const Allocation allocation = at->second;
  if (!host) {
    const Running running;
    const std::byte* end = allocation.base + allocation.mapped - page();
    for (const std::byte* byte = at->first + allocation.bytes; byte < end; ++byte) {
      if (*byte != std::byte{kCanary}) {
        std::fprintf(stderr, "device memory was written past its end\n");
        std::abort();
      }
    }
    s.used[static_cast<size_t>(allocation.device)] -= allocation.bytes;
  }
  s.memory.erase(at);
  munmap(allocation.base, allocation.mapped);
  return cudaSuccess;
}

bool known(CUstream_st* stream) {
  return state().streams.count(stream) != 0;
}

}  // namespace

namespace cuda_double {

void reset(const Options& options) {
  const Lock lock(state().mutex);
  State& s = state();
  s.options = options;
  s.generator.seed(options.seed);
  s.used.assign(static_cast<size_t>(options.num_devices), 0);
  s.calls = s.fail_at = s.waits = s.launches = 0;
  s.failed.clear();
  s.mood = 0;
  last_error = cudaSuccess;
  thread_device = 0;
}

void fail_call(int64_t number) {
  const Lock lock(state().mutex);
  state().calls = 0;
  state().fail_at = number;
  state().failed.clear();
}

int64_t num_calls() {
  return state().calls;
}
std::string failed_call() {
  return state().failed;
}
int64_t num_waits() {
  return state().waits;
}
int64_t num_launches() {
  return state().launches;
}

std::string alive() {
  const Lock lock(state().mutex);
  std::ostringstream text;
  for (const auto& [kind, count] : state().alive) {
    if (count != 0) {
      text << count << " " << kind << "; ";
    }
  }
  if (!state().memory.empty()) {
    text << state().memory.size() << " allocations; ";
  }
  return text.str();
}

bool enters_failure(const char* name) {
  const Lock lock(state().mutex);
  State& s = state();
  if (++s.calls != s.fail_at) {
    return false;
  }
  s.failed = name;
  return true;
}

void count_alive(const char* kind, int change) {
  const Lock lock(state().mutex);
  state().alive[kind] += change;
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  const Lock lock(state().mutex);
  if (!known(stream)) {
    return result(cudaErrorInvalidResourceHandle);
  }
  if (stream->capture != nullptr) {
    stream->capture->work.push_back(std::move(work));
  } else {
    stream->queue.push_back({OpKind::kWork, std::move(work), nullptr, 0});
  }
  return cudaSuccess;
}

cudaError_t enqueue_meeting(cudaStream_t stream,
                            std::shared_ptr<Rendezvous> rendezvous,
                            std::function<void()> work) {
  const Lock lock(state().mutex);
  if (!known(stream)) {
    return result(cudaErrorInvalidResourceHandle);
  }
  Op op{OpKind::kMeet, std::move(work), nullptr, 0};
  op.rendezvous = std::move(rendezvous);
  stream->queue.push_back(std::move(op));
  return cudaSuccess;
}

namespace {

struct Transfer {
  const void* from = nullptr;
  void* to = nullptr;
  size_t bytes = 0;
  std::shared_ptr<Rendezvous> rendezvous;
};

// Both sides of the transfer of this number between two ranks.
std::shared_ptr<Transfer> transfer_of(const void* group, int from, int to, bool sends) {
  struct Lane {
    std::vector<std::shared_ptr<Transfer>> transfers;
    size_t sent = 0, received = 0;
  };
  static std::map<std::tuple<const void*, int, int>, Lane> lanes;
  Lane& lane = lanes[{group, from, to}];
  const size_t number = sends ? lane.sent++ : lane.received++;
  if (number == lane.transfers.size()) {
    auto transfer = std::make_shared<Transfer>();
    transfer->rendezvous = std::make_shared<Rendezvous>();
    transfer->rendezvous->missing = 2;
    lane.transfers.push_back(std::move(transfer));
  }
  return lane.transfers[number];
}

void carry_out(const Transfer& transfer) {
  std::memmove(transfer.to, transfer.from, transfer.bytes);
}

}  // namespace

cudaError_t post_transfer(
    const void* group, int from, int to, const void* data, size_t bytes, cudaStream_t stream) {
  const Lock lock(state().mutex);
  if (bytes > 0 && !is_device_range(data, bytes)) {
    return cudaErrorInvalidValue;
  }
  const auto transfer = transfer_of(group, from, to, true);
  transfer->from = data;
  transfer->bytes = bytes;
  return enqueue_meeting(stream, transfer->rendezvous, [transfer] { carry_out(*transfer); });
}

cudaError_t take_transfer(
    const void* group, int from, int to, void* data, size_t bytes, cudaStream_t stream) {
  const Lock lock(state().mutex);
  if (bytes > 0 && !is_device_range(data, bytes)) {
    return cudaErrorInvalidValue;
  }
  const auto transfer = transfer_of(group, from, to, false);
  transfer->to = data;
  return enqueue_meeting(stream, transfer->rendezvous, [transfer] { carry_out(*transfer); });
}

void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

bool is_device_range(const void* data, size_t bytes) {
  const Lock lock(state().mutex);
  const Allocation* allocation = find(data, bytes);
  return allocation != nullptr && !allocation->host;
}

int current_device() {
  return thread_device;
}
int device_of(cudaStream_t stream) {
  const Lock lock(state().mutex);
  return known(stream) ? stream->device : -1;
}

}  // namespace cuda_double

// Kernels: ops/launch.cuh.
cudaError_t trainrt_double_launch(cudaStream_t stream, std::function<void()> work) {
  if (cuda_double::enters_failure("kernel launch")) {
    return result(cudaErrorLaunchFailure);
  }
  return cuda_double::enqueue(stream, [work = std::move(work)] {
    ++state().launches;
    work();
  });
}

#define DOUBLE_ENTRY(code)                     \
  const Lock lock(state().mutex);              \
  if (cuda_double::enters_failure(__func__)) { \
    return result(code);                       \
  }

extern "C" {

const char* cudaGetErrorName(cudaError_t code) {
  switch (code) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    default:
      return "cudaErrorOfDouble";
  }
}
const char* cudaGetErrorString(cudaError_t code) {
  return code == cudaErrorMemoryAllocation ? "out of memory" : "made to fail, or refused";
}
cudaError_t cudaGetLastError() {
  const cudaError_t code = last_error;
  last_error = cudaSuccess;
  return code;
}

cudaError_t cudaDriverGetVersion(int* version) {
  DOUBLE_ENTRY(cudaErrorInvalidValue)
  *version = state().options.driver_version;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  DOUBLE_ENTRY(cudaErrorInvalidValue)
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  DOUBLE_ENTRY(cudaErrorInsufficientDriver)
  if (state().options.driver_version < CUDART_VERSION / 1000 * 1000) {
    return result(cudaErrorInsufficientDriver);
  }
  *count = state().options.num_devices;
  return *count > 0 ? cudaSuccess : result(cudaErrorNoDevice);
}
cudaError_t cudaSetDevice(int device) {
  DOUBLE_ENTRY(cudaErrorInvalidDevice)
  if (device < 0 || device >= state().options.num_devices) {
    return result(cudaErrorInvalidDevice);
  }
  thread_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = thread_device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  DOUBLE_ENTRY(cudaErrorInvalidDevice)
  if (device < 0 || device >= state().options.num_devices) {
    return result(cudaErrorInvalidDevice);
  }
  std::memset(properties, 0, sizeof(*properties));
  std::snprintf(properties->name, sizeof(properties->name), "double %d", device);
  properties->major = state().options.compute_major;
  properties->minor = state().options.compute_minor;
  properties->totalGlobalMem = state().options.memory_bytes;
  properties->multiProcessorCount = 4;
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  DOUBLE_ENTRY(cudaErrorInvalidValue)
  *total_bytes = state().options.memory_bytes;
  *free_bytes = *total_bytes - state().used[static_cast<size_t>(thread_device)];
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  DOUBLE_ENTRY(cudaErrorMemoryAllocation)
  const size_t used = state().used[static_cast<size_t>(thread_device)];
  if (used + bytes > state().options.memory_bytes) {
    return result(cudaErrorMemoryAllocation);
  }
  return result(allocate(data, bytes, false));
}
cudaError_t cudaFree(void* data) {
  const Lock lock(state().mutex);
  if (data == nullptr) {
    return cudaSuccess;
  }
  drain();
  return result(release(data, false));
}
cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  DOUBLE_ENTRY(cudaErrorMemoryAllocation)
  return result(allocate(data, bytes, true));
}
cudaError_t cudaFreeHost(void* data) {
  const Lock lock(state().mutex);
  if (data == nullptr) {
    return cudaSuccess;
  }
  drain();
  return result(release(data, true));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  DOUBLE_ENTRY(cudaErrorMemoryAllocation)
  *stream = new CUstream_st{thread_device, {}, nullptr};
  state().streams.insert(*stream);
  cuda_double::count_alive("streams", 1);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(state().mutex);
  if (!known(stream)) {
    return result(cudaErrorInvalidResourceHandle);
  }
  run_until(stream, [&] { return stream->queue.empty(); });
  state().streams.erase(stream);
  cuda_double::count_alive("streams", -1);
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  DOUBLE_ENTRY(cudaErrorIllegalAddress)
  if (!known(stream)) {
    return result(cudaErrorInvalidResourceHandle);
  }
  if (stream->capture != nullptr) {
    return result(cudaErrorStreamCaptureUnsupported);
  }
  const bool ran = run_until(stream, [&] { return stream->queue.empty(); });
  return ran ? cudaSuccess : result(cudaErrorLaunchTimeout);
}
cudaError_t cudaDeviceSynchronize() {
  DOUBLE_ENTRY(cudaErrorIllegalAddress)
  drain();
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  DOUBLE_ENTRY(cudaErrorInvalidResourceHandle)
  if (!known(stream) || state().events.count(event) == 0) {
    return result(cudaErrorInvalidResourceHandle);
  }
  ++state().waits;
  if (event->recorded > 0 && state().waits != state().options.drop_wait) {
    stream->queue.push_back({OpKind::kWait, nullptr, event, event->recorded});
  }
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  DOUBLE_ENTRY(cudaErrorMemoryAllocation)
  *event = new CUevent_st;
  state().events.insert(*event);
  cuda_double::count_alive("events", 1);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock(state().mutex);
  if (state().events.count(event) == 0) {
    return result(cudaErrorInvalidResourceHandle);
  }
  if (event->stream != nullptr && known(event->stream)) {
    run_until(event->stream, [&] { return event->completed >= event->recorded; });
  }
  drain();  // nobody may still wait for it
  state().events.erase(event);
  cuda_double::count_alive("events", -1);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  DOUBLE_ENTRY(cudaErrorInvalidResourceHandle)
  if (!known(stream) || state().events.count(event) == 0) {
    return result(cudaErrorInvalidResourceHandle);
  }
  event->stream = stream;
  stream->queue.push_back({OpKind::kRecord, nullptr, event, ++event->recorded});
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  DOUBLE_ENTRY(cudaErrorIllegalAddress)
  if (state().events.count(event) == 0) {
    return result(cudaErrorInvalidResourceHandle);
  }
  run_some();
  return event->completed >= event->recorded ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  DOUBLE_ENTRY(cudaErrorIllegalAddress)
  if (state().events.count(event) == 0) {
    return result(cudaErrorInvalidResourceHandle);
  }
  if (event->recorded == event->completed) {
    return cudaSuccess;
  }
  const int64_t ticket = event->recorded;
  const bool ran = run_until(event->stream, [&] { return event->completed >= ticket; });
  return ran ? cudaSuccess : result(cudaErrorLaunchTimeout);
}

// Host memory that is not pinned is read at once, as the real runtime may do; pinned memory when
// the stream gets there.
cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  DOUBLE_ENTRY(cudaErrorInvalidValue)
  if (bytes == 0) {
    return cudaSuccess;
  }
  const bool to_device = cuda_double::is_device_range(to, bytes);
  const bool from_device = cuda_double::is_device_range(from, bytes);
  const bool fits = kind == cudaMemcpyHostToDevice     ? to_device && !from_device
                    : kind == cudaMemcpyDeviceToHost   ? !to_device && from_device
                    : kind == cudaMemcpyDeviceToDevice ? to_device && from_device
                                                       : kind == cudaMemcpyDefault;
  if (!fits) {
    return result(cudaErrorInvalidValue);
  }
  if (find(from, bytes) == nullptr) {
    auto copy = std::make_shared<std::vector<std::byte>>(
        static_cast<const std::byte*>(from), static_cast<const std::byte*>(from) + bytes);
    return result(
        cuda_double::enqueue(stream, [=] { std::memcpy(to, copy->data(), copy->size()); }));
  }
  return result(cuda_double::enqueue(stream, [=] { std::memmove(to, from, bytes); }));
}
cudaError_t cudaMemcpy2DAsync(void* to,
                              size_t to_pitch,
                              const void* from,
                              size_t from_pitch,
                              size_t width,
                              size_t height,
                              cudaMemcpyKind kind,
                              cudaStream_t stream) {
  DOUBLE_ENTRY(cudaErrorInvalidValue)
  if (width == 0 || height == 0) {
    return cudaSuccess;
  }
  if (kind != cudaMemcpyDefault || width > to_pitch || width > from_pitch ||
      find(to, to_pitch * (height - 1) + width) == nullptr ||
      find(from, from_pitch * (height - 1) + width) == nullptr) {
    return result(cudaErrorInvalidPitchValue);
  }
  return result(cuda_double::enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * to_pitch,
                  static_cast<const std::byte*>(from) + row * from_pitch,
                  width);
    }
  }));
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  DOUBLE_ENTRY(cudaErrorInvalidValue)
  if (bytes == 0) {
    return cudaSuccess;
  }
  if (!cuda_double::is_device_range(to, bytes)) {
    return result(cudaErrorInvalidValue);
  }
  return result(cuda_double::enqueue(stream, [=] { std::memset(to, value, bytes); }));
}

cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}
cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}

}  // extern "C"
