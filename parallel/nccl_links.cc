// What may be called while another thread aborts is called under `mutex_`: NCCL wants one call at a
// time of a communicator.
#include "parallel/nccl_links.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <utility>

#include "graph/base/cuda_check.h"

namespace trainrt {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{2};  // between two looks at calls under way
// A call is put on its stream by a thread that NCCL makes for it, in some ten microseconds: it is
// worth a look at once, and sleeping only where a peer is not there yet.
constexpr std::chrono::milliseconds kSpinTime{1};
constexpr std::chrono::microseconds kStartPoll{200};
constexpr std::chrono::milliseconds kNoticeTime{1000};  // for the notice of who failed first
constexpr std::chrono::milliseconds kCloseTime{5000};   // a rank may still be writing files
// What the driver is given to answer beyond the deadline, at most as long again: it may be busy.
constexpr std::chrono::milliseconds kDriverTime{10000};

// With what NCCL says of its last error, wherever that was: "unhandled cuda error" alone is the
// same for want of memory and for a broken GPU.
std::string reason_of(ncclResult_t result) {
  const char* last = ncclGetLastError(nullptr);
  const bool is_known = last != nullptr && *last != 0;
  size_t free_bytes = 0, total_bytes = 0;
  if (result == ncclUnhandledCudaError &&
      cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess) {
    return concat(ncclGetErrorString(result),
                  is_known ? concat(" (its last error: ", last, ")") : "",
                  "; ",
                  free_bytes,
                  " of the GPU's ",
                  total_bytes,
                  " bytes are free");
  }
  return concat(ncclGetErrorString(result),
                is_known ? concat(" (its last error: ", last, ")") : "");
}

}  // namespace

NcclLinks::NcclLinks(Communicator& group, int device, std::chrono::milliseconds deadline)
    : group_(group),
      device_(device),
      deadline_(deadline),
      exceptions_(std::uncaught_exceptions()),
      watcher_([this] { watch(); }),
      guard_([this](const std::stop_token& stopped) { guard(stopped); }) {}

NcclLinks::~NcclLinks() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  watcher_.join();
  guard_ = std::jthread();
  static_cast<void>(cudaSetDevice(device_));
  const bool fails =
      std::uncaught_exceptions() > exceptions_ || !failure().empty() || !group_.failure().empty();
  if (fails || !close()) {
    give_up("closed");
  }
  for (const Call& call : calls_) {
    static_cast<void>(cudaEventDestroy(call.done));
  }
  for (const cudaEvent_t event : free_events_) {
    static_cast<void>(cudaEventDestroy(event));
  }
}

size_t NcclLinks::join(
    cudaStream_t stream, int num_ranks, const ncclUniqueId& id, int rank, int blocks) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.maxCTAs = blocks;
  ncclResult_t started = ncclSuccess;
  size_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = links_.size();
    links_.push_back({stream, nullptr, 0});
    if (failure_.empty()) {
      started = ncclCommInitRankConfig(&links_.back().comm, num_ranks, id, rank, &config);
    }
  }
  finish(links_[number], started, "initialisation");
  return number;
}

void NcclLinks::run(size_t link,
                    const std::string& name,
                    const std::function<ncclResult_t(ncclComm_t)>& fn) {
  throw_failure();
  Link& used = links_[link];
  Call call{link, used.number, concat(name, " #", used.number), nullptr, Clock::now()};
  ++used.number;
  if (link == 0) {
    group_.note_calls(used.number);
  }
  ncclResult_t started = ncclSuccess;
  {
    const std::lock_guard lock(mutex_);
    if (used.comm != nullptr) {
      started = fn(used.comm);
    }
  }
  finish(used, started, call.name);
  watch_call(std::move(call));
}

std::string NcclLinks::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void NcclLinks::throw_failure() const {
  const std::string reason = failure();
  TRAINRT_REQUIRE(reason.empty(), kCommunication, reason);
}

// Waits for a call that a non-blocking communicator answers with "in progress": before that its
// work is not on the stream.
void NcclLinks::finish(Link& link, ncclResult_t result, const std::string& name) {
  const auto start = Clock::now();
  while (result == ncclInProgress) {
    const auto waited = Clock::now() - start;
    if (waited < kSpinTime) {
      std::this_thread::yield();
    } else {
      const std::string others = group_.failure();
      if (!others.empty()) {
        give_up(others);
      } else if (waited > deadline_) {
        report(concat(name, " did not end within ", deadline_.count(), " ms: a rank is missing"));
      }
      std::this_thread::sleep_for(kStartPoll);
    }
    throw_failure();
    const std::lock_guard lock(mutex_);
    if (link.comm != nullptr) {
      ncclResult_t state = ncclInProgress;
      const ncclResult_t asked = ncclCommGetAsyncError(link.comm, &state);
      result = asked == ncclSuccess ? state : asked;
    }
  }
  if (result != ncclSuccess) {
    report(concat(name, ": ", reason_of(result)));
  }
  throw_failure();
}

// Lets the watcher see to it that the work just queued ends in time.
void NcclLinks::watch_call(Call call) {
  {
    const std::lock_guard lock(mutex_);
    if (!free_events_.empty()) {
      call.done = free_events_.back();
      free_events_.pop_back();
    }
  }
  if (call.done == nullptr) {
    TRAINRT_CUDA_CHECK(cudaEventCreateWithFlags(&call.done, cudaEventDisableTiming));
  }
  const cudaError_t recorded = cudaEventRecord(call.done, links_[call.link].stream);
  {
    const std::lock_guard lock(mutex_);
    if (recorded == cudaSuccess) {
      calls_.push_back(std::move(call));
    } else {
      free_events_.push_back(call.done);
    }
  }
  if (recorded != cudaSuccess) {
    cuda::fail(cuda::failure_of(recorded), "cudaEventRecord");
  }
  changed_.notify_all();
}

void NcclLinks::watch() {
  static_cast<void>(cudaSetDevice(device_));
  std::unique_lock lock(mutex_);
  while (!closing_ && failure_.empty()) {
    if (calls_.empty()) {
      alive_ = 0;
      changed_.wait(lock);
      continue;
    }
    alive_ = Clock::now().time_since_epoch().count();
    const std::string reason = look(lock);
    lock.unlock();
    const std::string others = group_.failure();
    if (!others.empty() || !reason.empty()) {
      alive_ = 0;  // what follows takes its time, and tells the others by itself
    }
    if (!others.empty()) {
      give_up(others);
    } else if (!reason.empty()) {
      report(reason);
    }
    lock.lock();
    changed_.wait_for(lock, kPoll, [this] { return closing_; });
  }
}

// Takes note of calls that have ended; why the communicator must be given up, or nothing. The
// driver is asked without the lock: whoever must give up need not wait for its answer.
std::string NcclLinks::look(std::unique_lock<std::mutex>& lock) {
  for (const Link& link : links_) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked =
        link.comm == nullptr ? ncclSuccess : ncclCommGetAsyncError(link.comm, &state);
    if (asked != ncclSuccess || (state != ncclSuccess && state != ncclInProgress)) {
      return reason_of(asked != ncclSuccess ? asked : state);
    }
  }
  // By link, number and event of the first: a call waits for those before it.
  std::map<size_t, std::pair<int64_t, cudaEvent_t>> heads;
  for (bool has_ended = true; has_ended;) {
    heads.clear();
    for (const Call& call : calls_) {
      heads.try_emplace(call.link, call.number, call.done);
    }
    lock.unlock();
    std::set<cudaEvent_t> ended;
    cudaError_t failed = cudaSuccess;
    for (const auto& [link, head] : heads) {
      const cudaError_t reached = cudaEventQuery(head.second);
      if (reached == cudaSuccess) {
        ended.insert(head.second);
      } else if (reached != cudaErrorNotReady) {
        failed = reached;
      }
    }
    lock.lock();
    if (failed != cudaSuccess) {
      return cudaGetErrorString(failed);
    }
    has_ended = !ended.empty();
    std::erase_if(calls_, [&ended](const Call& call) { return ended.count(call.done) != 0; });
    free_events_.insert(free_events_.end(), ended.begin(), ended.end());
  }
  for (Call& call : calls_) {
    const auto head = heads.find(call.link);
    if (head == heads.end() || head->second.first != call.number) {
      call.started = Clock::now();
    } else if (Clock::now() - call.started > deadline_) {
      return late(call);
    }
  }
  return "";
}

// Whether the watcher is alive. Publishing that it is not needs neither the driver nor the lock;
// this process is then ended by whoever hears of it (runtime/failure_watch).
void NcclLinks::guard(const std::stop_token& stopped) {
  const std::chrono::milliseconds patience = deadline_ + std::min(deadline_, kDriverTime);
  const std::chrono::milliseconds between_looks =
      std::clamp<std::chrono::milliseconds>(patience / 8, kPoll, std::chrono::seconds(1));
  std::mutex mutex;
  std::condition_variable_any woken;
  std::unique_lock lock(mutex);
  while (!woken.wait_for(lock, stopped, between_looks, [] { return false; }) &&
         !stopped.stop_requested()) {
    const Clock::rep alive = alive_;
    if (alive != 0 && Clock::now() - Clock::time_point(Clock::duration(alive)) > patience) {
      group_.abort(
          concat("rank ",
                 group_.rank(),
                 " of ",
                 group_.world_size(),
                 " (NCCL): the driver of cuda:",
                 device_,
                 " has not answered within ",
                 patience.count(),
                 " ms; nvidia-smi and the kernel's log may tell what is wrong with the GPU"));
      return;
    }
  }
}

std::string NcclLinks::late(const Call& call) const {
  std::string missing;
  if (call.link == 0) {
    for (const int rank : group_.ranks_behind(call.number + 1)) {
      missing += concat(missing.empty() ? "missing rank " : ", ", rank);
    }
  }
  return concat(
      call.name,
      " did not end within ",
      deadline_.count(),
      " ms: ",
      missing.empty() ? "a rank is missing, or computes longer than --deadline" : missing);
}

// This rank has found a failure. Another one may have caused it, whose notice is on its way.
void NcclLinks::report(const std::string& reason) {
  const std::string text =
      concat("rank ", group_.rank(), " of ", group_.world_size(), " (NCCL): ", reason);
  const auto end = Clock::now() + kNoticeTime;
  std::string others = group_.failure();
  while (others.empty() && Clock::now() < end) {
    std::this_thread::sleep_for(kPoll);
    others = group_.failure();
  }
  if (others.empty()) {
    group_.abort(text);
  }
  give_up(others.empty() ? text : others);
}

// The first reason stays; this rank's waiting kernels are ended. All communicators are aborted as
// one group, which tells all their kernels to end before it frees anything: one by one, freeing the
// first would wait for the kernels of the others for ever.
void NcclLinks::give_up(const std::string& reason) noexcept {
  static_cast<void>(cudaSetDevice(device_));  // any thread may do so
  std::vector<ncclComm_t> aborted;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) {
      failure_ = reason.empty() ? "aborted" : reason;
    }
    for (Link& link : links_) {
      if (link.comm != nullptr) {
        aborted.push_back(std::exchange(link.comm, nullptr));
      }
    }
  }
  const bool grouped = ncclGroupStart() == ncclSuccess;
  for (const ncclComm_t comm : aborted) {
    static_cast<void>(ncclCommAbort(comm));
  }
  if (grouped) {
    static_cast<void>(ncclGroupEnd());
  }
  changed_.notify_all();
}

// Collective. False when it cannot be done.
bool NcclLinks::close() noexcept {
  const auto end = Clock::now() + kCloseTime;
  for (Link& link : links_) {
    if (link.comm == nullptr) {
      return false;
    }
    ncclResult_t state = ncclCommFinalize(link.comm);
    while (state == ncclInProgress && Clock::now() < end && group_.failure().empty()) {
      std::this_thread::sleep_for(kStartPoll);
      const ncclResult_t asked = ncclCommGetAsyncError(link.comm, &state);
      state = asked == ncclSuccess ? state : asked;
    }
    if (state != ncclSuccess) {
      return false;
    }
    static_cast<void>(ncclCommDestroy(std::exchange(link.comm, nullptr)));
  }
  return true;
}

}  // namespace trainrt
