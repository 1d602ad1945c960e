#include "parallel/nccl_communicator.h"

#include <nccl.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "graph/base/cuda_check.h"

namespace trainrt {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPoll{2};  // between two looks at a call that is under way

ncclDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kInt32:
      return ncclInt32;
    case DType::kInt64:
      return ncclInt64;
    case DType::kUInt32:
      return ncclUint32;
    case DType::kUInt64:
      return ncclUint64;
    case DType::kInt8:
      return ncclInt8;
    case DType::kUInt8:
    case DType::kBool:
      return ncclUint8;
    default:
      TRAINRT_FAIL(kUnsupported, "NCCL does not know ", dtype_name(dtype));
  }
}

ncclRedOp_t operation(ReductionKind kind) {
  return kind == ReductionKind::kMax ? ncclMax : kind == ReductionKind::kMin ? ncclMin : ncclSum;
}

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(
      int rank, int world_size, int device, cudaStream_t stream, std::chrono::milliseconds deadline)
      : rank_(rank),
        world_size_(world_size),
        device_(device),
        stream_(stream),
        deadline_(deadline) {}

  ~NcclCommunicator() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    if (watcher_.joinable()) {
      watcher_.join();
    }
    static_cast<void>(cudaSetDevice(device_));
    for (const Call& call : calls_) {
      static_cast<void>(cudaEventDestroy(call.done));
    }
    for (const cudaEvent_t event : free_events_) {
      static_cast<void>(cudaEventDestroy(event));
    }
    const std::lock_guard lock(mutex_);
    if (comm_ != nullptr) {
      // A failed communicator, and one whose ranks may have gone, is not waited for.
      static_cast<void>(failure_.empty() ? ncclCommDestroy(comm_) : ncclCommAbort(comm_));
    }
  }
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Collective: joins the communicator that `id` names.
  void connect(const ncclUniqueId& id) {
    TRAINRT_CUDA_CHECK(cudaSetDevice(device_));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    finish(ncclCommInitRankConfig(&comm_, world_size_, id, rank_, &config), "initialisation");
    watcher_ = std::thread([this] { watch(); });
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  void all_reduce(void* data, int64_t count, DType dtype, ReductionKind reduction) override {
    run("all_reduce", [&] {
      return ncclAllReduce(
          data, data, size(count), data_type(dtype), operation(reduction), comm_, stream_);
    });
  }

  void reduce_scatter(const void* input,
                      void* output,
                      const std::vector<int64_t>& counts,
                      DType dtype,
                      ReductionKind reduction) override {
    if (equal(counts)) {
      run("reduce_scatter", [&] {
        return ncclReduceScatter(
            input, output, size(counts[0]), data_type(dtype), operation(reduction), comm_, stream_);
      });
      return;
    }
    // Uneven: one reduction per segment, to the rank that owns it.
    run_group("reduce_scatter", [&](std::vector<ncclResult_t>& results) {
      const std::byte* segment = static_cast<const std::byte*>(input);
      for (int r = 0; r < world_size_; ++r) {
        const int64_t count = counts[static_cast<size_t>(r)];
        results.push_back(ncclReduce(segment,
                                     r == rank_ ? output : nullptr,
                                     size(count),
                                     data_type(dtype),
                                     operation(reduction),
                                     r,
                                     comm_,
                                     stream_));
        segment += count * dtype_bytes(dtype);
      }
    });
  }

  void all_gather(const void* input,
                  void* output,
                  const std::vector<int64_t>& counts,
                  DType dtype) override {
    if (equal(counts)) {
      run("all_gather", [&] {
        return ncclAllGather(input, output, size(counts[0]), data_type(dtype), comm_, stream_);
      });
      return;
    }
    run_group("all_gather", [&](std::vector<ncclResult_t>& results) {
      std::byte* segment = static_cast<std::byte*>(output);
      for (int r = 0; r < world_size_; ++r) {
        const int64_t count = counts[static_cast<size_t>(r)];
        results.push_back(ncclBroadcast(r == rank_ ? input : segment,
                                        segment,
                                        size(count),
                                        data_type(dtype),
                                        r,
                                        comm_,
                                        stream_));
        segment += count * dtype_bytes(dtype);
      }
    });
  }

  void all_to_all(const void* input,
                  const std::vector<int64_t>& send_counts,
                  void* output,
                  const std::vector<int64_t>& recv_counts,
                  DType dtype) override {
    run_group("all_to_all", [&](std::vector<ncclResult_t>& results) {
      const std::byte* from = static_cast<const std::byte*>(input);
      std::byte* to = static_cast<std::byte*>(output);
      for (int r = 0; r < world_size_; ++r) {
        const int64_t sent = send_counts[static_cast<size_t>(r)];
        const int64_t received = recv_counts[static_cast<size_t>(r)];
        results.push_back(ncclSend(from, size(sent), data_type(dtype), r, comm_, stream_));
        results.push_back(ncclRecv(to, size(received), data_type(dtype), r, comm_, stream_));
        from += sent * dtype_bytes(dtype);
        to += received * dtype_bytes(dtype);
      }
    });
  }

  void broadcast(void* data, int64_t bytes, int root) override {
    run("broadcast",
        [&] { return ncclBroadcast(data, data, size(bytes), ncclUint8, root, comm_, stream_); });
  }

  // NCCL matches sends and receives of a pair by their order; the programs keep it, so tags are not
  // needed.
  void send(const void* data, int64_t bytes, int peer, int) override {
    run("send", [&] { return ncclSend(data, size(bytes), ncclUint8, peer, comm_, stream_); });
  }
  void recv(void* data, int64_t bytes, int peer, int) override {
    run("recv", [&] { return ncclRecv(data, size(bytes), ncclUint8, peer, comm_, stream_); });
  }

  void barrier() override {
    cudaEvent_t last = nullptr;
    TRAINRT_CUDA_CHECK(cudaSetDevice(device_));
    void* word = nullptr;
    TRAINRT_CUDA_CHECK(cudaMalloc(&word, sizeof(int32_t)));
    try {
      all_reduce(word, 1, DType::kInt32, ReductionKind::kMax);
      TRAINRT_CUDA_CHECK(cudaEventCreateWithFlags(&last, cudaEventDisableTiming));
      TRAINRT_CUDA_CHECK(cudaEventRecord(last, stream_));
      TRAINRT_CUDA_CHECK(cudaEventSynchronize(last));
      throw_failure("barrier");
    } catch (...) {
      static_cast<void>(cudaEventDestroy(last));
      static_cast<void>(cudaFree(word));
      throw;
    }
    TRAINRT_CUDA_CHECK(cudaEventDestroy(last));
    TRAINRT_CUDA_CHECK(cudaFree(word));
  }

  std::unique_ptr<Communicator> split(int color, int key) override {
    throw_failure("split");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t part = nullptr;
    const ncclResult_t started = ncclCommSplit(comm_, color, key, &part, &config);
    finish(started, "split");
    const auto end = Clock::now() + deadline_;
    ncclResult_t state = ncclInProgress;
    while (part == nullptr ||
           (ncclCommGetAsyncError(part, &state) == ncclSuccess && state == ncclInProgress)) {
      if (Clock::now() > end) {
        fail(concat("split did not end within ", deadline_.count(), " ms"));
        throw_failure("split");
      }
      std::this_thread::sleep_for(kPoll);
    }
    int part_rank = 0, part_size = 0;
    finish(ncclCommUserRank(part, &part_rank), "split");
    finish(ncclCommCount(part, &part_size), "split");
    auto made =
        std::make_unique<NcclCommunicator>(part_rank, part_size, device_, stream_, deadline_);
    made->comm_ = part;
    made->watcher_ = std::thread([raw = made.get()] { raw->watch(); });
    return made;
  }

  void abort(const std::string& reason) noexcept override {
    try {
      fail(reason);
    } catch (...) {  // NOLINT(bugprone-empty-catch): there is nobody left to tell
    }
  }

 private:
  struct Call {
    std::string name;
    int64_t number;
    cudaEvent_t done;
    Clock::time_point started;
  };

  static size_t size(int64_t count) { return static_cast<size_t>(count); }
  static bool equal(const std::vector<int64_t>& counts) {
    for (const int64_t count : counts) {
      if (count != counts[0]) {
        return false;
      }
    }
    return true;
  }

  void throw_failure(const char* call) {
    const std::lock_guard lock(mutex_);
    TRAINRT_REQUIRE(failure_.empty(),
                    kCommunication,
                    "rank ",
                    rank_,
                    " of ",
                    world_size_,
                    " (NCCL): ",
                    call,
                    " number ",
                    number_,
                    ": ",
                    failure_);
  }

  // Waits for a call that a non-blocking communicator answers with "in progress".
  void finish(ncclResult_t result, const char* call) {
    const auto end = Clock::now() + deadline_;
    while (result == ncclInProgress && Clock::now() < end) {
      std::this_thread::sleep_for(kPoll);
      ncclResult_t state = ncclInProgress;
      const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
      result = asked == ncclSuccess ? state : asked;
    }
    if (result != ncclSuccess) {
      fail(result == ncclInProgress
               ? concat("did not end within ", deadline_.count(), " ms: a rank is missing")
               : std::string(ncclGetErrorString(result)));
    }
    throw_failure(call);
  }

  template <typename Fn>
  void run(const char* name, const Fn& fn) {
    begin();
    finish(fn(), name);
    watch_call(name);
  }

  template <typename Fn>
  void run_group(const char* name, const Fn& fn) {
    begin();
    finish(ncclGroupStart(), name);
    std::vector<ncclResult_t> results;
    fn(results);
    const ncclResult_t ended = ncclGroupEnd();
    for (const ncclResult_t result : results) {
      if (result != ncclSuccess && result != ncclInProgress) {
        finish(result, name);
      }
    }
    finish(ended, name);
    watch_call(name);
  }

  void begin() {
    throw_failure("a call after");
    ++number_;
  }

  // Lets the watcher see to it that the work just queued ends in time.
  void watch_call(const char* name) {
    cudaEvent_t done = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (!free_events_.empty()) {
        done = free_events_.back();
        free_events_.pop_back();
      }
    }
    if (done == nullptr) {
      TRAINRT_CUDA_CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    }
    const cudaError_t recorded = cudaEventRecord(done, stream_);
    {
      const std::lock_guard lock(mutex_);
      if (recorded == cudaSuccess) {
        calls_.push_back({name, number_, done, Clock::now()});
      } else {
        free_events_.push_back(done);
      }
    }
    TRAINRT_CUDA_CHECK(recorded);
    changed_.notify_all();
  }

  void watch() {
    static_cast<void>(cudaSetDevice(device_));
    std::unique_lock lock(mutex_);
    while (!closing_) {
      if (calls_.empty() || !failure_.empty()) {
        changed_.wait(lock);
        continue;
      }
      lock.unlock();
      const std::string reason = look();
      if (!reason.empty()) {
        fail(reason);
      }
      lock.lock();
      changed_.wait_for(lock, kPoll, [this] { return closing_; });
    }
  }

  // Takes note of calls that have ended; why the communicator must be given up, or nothing.
  std::string look() {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
    if (asked != ncclSuccess || (state != ncclSuccess && state != ncclInProgress)) {
      return ncclGetErrorString(asked != ncclSuccess ? asked : state);
    }
    const std::lock_guard lock(mutex_);
    while (!calls_.empty()) {
      const cudaError_t reached = cudaEventQuery(calls_.front().done);
      if (reached == cudaErrorNotReady) {
        const Call& call = calls_.front();
        return Clock::now() - call.started < deadline_
                   ? ""
                   : concat(call.name,
                            " number ",
                            call.number,
                            " did not end within ",
                            deadline_.count(),
                            " ms: a rank is missing, or computes longer than --deadline");
      }
      if (reached != cudaSuccess) {
        return cudaGetErrorString(reached);
      }
      free_events_.push_back(calls_.front().done);
      calls_.pop_front();
      if (!calls_.empty()) {  // a call waits for those before it
        calls_.front().started = std::max(calls_.front().started, Clock::now());
      }
    }
    return "";
  }

  // The first reason stays; the communicator's kernels are ended.
  void fail(const std::string& reason) {
    ncclComm_t aborted = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (!failure_.empty()) {
        return;
      }
      failure_ = reason.empty() ? "aborted" : reason;
      std::swap(aborted, comm_);
    }
    if (aborted != nullptr) {
      static_cast<void>(ncclCommAbort(aborted));
    }
  }

  int rank_, world_size_, device_;
  cudaStream_t stream_;
  std::chrono::milliseconds deadline_;
  ncclComm_t comm_ = nullptr;
  int64_t number_ = 0;  // of calls, as in the messages of the other communicators

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::string failure_;
  std::deque<Call> calls_;  // under way, in order
  std::vector<cudaEvent_t> free_events_;
  bool closing_ = false;
  std::thread watcher_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& group,
                                                     int device,
                                                     cudaStream_t stream,
                                                     std::chrono::milliseconds deadline) {
  ncclUniqueId id{};
  if (group.rank() == 0) {
    const ncclResult_t result = ncclGetUniqueId(&id);
    TRAINRT_REQUIRE(result == ncclSuccess,
                    kCommunication,
                    "ncclGetUniqueId failed: ",
                    ncclGetErrorString(result));
  }
  group.broadcast(&id, sizeof(id), 0);
  auto communicator = std::make_unique<NcclCommunicator>(
      group.rank(), group.world_size(), device, stream, deadline);
  communicator->connect(id);
  return communicator;
}

}  // namespace trainrt
