// A GPU as a device. All work goes to one compute stream, in the order in which the executor asks
// for it; communication has streams of its own (parallel/nccl_communicator).
//
// Host data is copied into a ring of pinned blocks before it is sent, so that the caller's memory
// is free at once and the host runs ahead of the device. Only reading from the device waits for it.
#include <cublasLt.h>
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>
#include <cudnn.h>
#include <nvtx3/nvToolsExt.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>

#include "graph/base/cuda_check.h"
#include "graph/base/log.h"
#include "graph/cuda_context.h"
#include "graph/cuda_handle.h"
#include "parallel/nccl_communicator.h"
#include "runtime/cuda_kernels.h"
#include "runtime/cuda_versions.h"
#include "runtime/load_cuda.h"
#include "runtime/module_interface.h"

namespace trainrt {

namespace {

constexpr int64_t kStagingBytes = 4 << 20;  // of one pinned block
constexpr size_t kStagingBlocks = 4;
constexpr int kOldestArchitecture = 80;
constexpr int64_t kMaxPitch = 2147483647;  // cudaDevAttrMaxPitch of all GPUs

using cuda::Event;
using cuda::Owned;
using cuda::Stream;
using CublasHandle = Owned<cublasLtHandle_t, cublasLtDestroy>;
using CudnnHandle = Owned<cudnnHandle_t, cudnnDestroy>;

int architecture_of(const cudaDeviceProp& properties) {
  return properties.major * 10 + properties.minor;
}

std::string isa_of(const cudaDeviceProp& properties) {
  return concat("sm_", architecture_of(properties));
}

std::string uuid_of(const cudaDeviceProp& properties) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : properties.uuid.bytes) {
    const auto value = static_cast<unsigned char>(byte);
    text += {kDigits[value / 16], kDigits[value % 16]};
  }
  return text;
}

cudaDeviceProp properties_of(int index) {
  cudaDeviceProp properties;
  TRAINRT_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  return properties;
}

int device_count() {
  int driver = 0, runtime = 0, count = 0;
  TRAINRT_CUDA_CHECK(cudaDriverGetVersion(&driver));
  TRAINRT_CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  const cudaError_t code = cudaGetDeviceCount(&count);
  TRAINRT_REQUIRE(code != cudaErrorInsufficientDriver,
                  kDevice,
                  "the NVIDIA driver supports CUDA ",
                  cuda_version_text(driver),
                  ", this build needs CUDA ",
                  cuda_version_text(runtime),
                  ": install a newer driver");
  TRAINRT_REQUIRE(code != cudaErrorNoDevice,
                  kDevice,
                  "the NVIDIA driver is there, but no GPU (is CUDA_VISIBLE_DEVICES empty?)");
  if (code != cudaSuccess) {
    cuda::fail(cuda::failure_of(code), "cudaGetDeviceCount");
  }
  return count;
}

DeviceSpec spec_of(int index, const DeviceOptions& options) {
  const int count = device_count();
  TRAINRT_REQUIRE(index >= 0 && index < count,
                  kDevice,
                  "there is no cuda:",
                  index,
                  "; this machine has ",
                  count,
                  count == 1 ? " GPU" : " GPUs");
  const cudaDeviceProp properties = properties_of(index);
  TRAINRT_REQUIRE(architecture_of(properties) >= kOldestArchitecture,
                  kDevice,
                  "cuda:",
                  index,
                  " (",
                  properties.name,
                  ") is ",
                  isa_of(properties),
                  "; built for sm_",
                  kOldestArchitecture,
                  " and newer. Run with --devices cpu");
  DeviceSpec spec;
  spec.backend = Backend::kCuda;
  spec.isa = isa_of(properties);
  spec.threads = 1;
  spec.reference_kernels = options.reference_kernels;
  return spec;
}

class Context : public CudaContext {
 public:
  Context(int index,
          DeviceSpec spec,
          const DeviceOptions& options,
          std::shared_ptr<AlgorithmCache> algorithms,
          std::shared_ptr<CompiledKernels> kernels)
      : index_(index),
        spec_(std::move(spec)),
        name_(properties_of(index).name),
        algorithms_(std::move(algorithms)),
        kernels_(std::move(kernels)),
        deterministic_(options.deterministic),
        tf32_(options.tf32) {
    TRAINRT_CUDA_CHECK(cudaStreamCreateWithFlags(stream_.put(), cudaStreamNonBlocking));
  }
  const DeviceSpec& spec() const override { return spec_; }
  void* stream() override { return stream_.get(); }
  cudaStream_t cuda_stream() override { return stream_.get(); }
  cublasLtHandle_t cublas() override {
    if (cublas_.get() == nullptr) {
      TRAINRT_CUDA_CHECK(cublasLtCreate(cublas_.put()));
    }
    return cublas_.get();
  }
  cudnnHandle_t cudnn() override {
    if (cudnn_.get() == nullptr) {
      TRAINRT_CUDA_CHECK(cudnnCreate(cudnn_.put()));
      TRAINRT_CUDA_CHECK(cudnnSetStream(cudnn_.get(), stream_.get()));
    }
    return cudnn_.get();
  }
  bool deterministic() const override { return deterministic_; }
  bool tf32() const override { return tf32_; }
  const std::string& device_name() const override { return name_; }
  AlgorithmCache& algorithms() override { return *algorithms_; }
  std::shared_ptr<const void>& shared(const std::string& name) override { return shared_[name]; }
  cudaKernel_t compiled(const DeviceSource& source) override { return kernels_->find(source); }
  void note(const std::string& text) override {
    if (noted_.insert(text).second) {
      log_info("cuda:", index_, ": ", text);
    }
  }
  void parallel_for(int64_t, int64_t, const std::function<void(int64_t, int64_t)>&) override {
    TRAINRT_FAIL(kInternal, "cuda:", index_, ": a CPU kernel was given a CUDA device");
  }

 private:
  int index_;
  DeviceSpec spec_;
  std::string name_;
  std::shared_ptr<AlgorithmCache> algorithms_;
  std::shared_ptr<CompiledKernels> kernels_;
  bool deterministic_, tf32_;
  Stream stream_;
  CublasHandle cublas_;
  CudnnHandle cudnn_;
  std::map<std::string, std::shared_ptr<const void>> shared_;  // may hold what is cuDNN's
  std::set<std::string> noted_;
};

class DeviceMemory : public DeviceBuffer {
 public:
  DeviceMemory(int index, void* data, int64_t bytes)
      : index_(index), data_(static_cast<std::byte*>(data)), bytes_(bytes) {}
  ~DeviceMemory() override {
    static_cast<void>(cudaSetDevice(index_));
    static_cast<void>(cudaFree(data_));
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  std::byte* data() override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  int index_;
  std::byte* data_;
  int64_t bytes_;
};

// Pinned, at an address that the device has too.
class HostMemory : public DeviceBuffer {
 public:
  explicit HostMemory(int64_t bytes) : bytes_(bytes) {
    const size_t room = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    TRAINRT_CUDA_CHECK(cudaHostAlloc(data_.put(), room, cudaHostAllocMapped));
    std::memset(data_.get(), 0, room);
  }
  std::byte* data() override { return static_cast<std::byte*>(data_.get()); }
  int64_t bytes() const override { return bytes_; }

 private:
  cuda::PinnedMemory data_;
  int64_t bytes_;
};

// Pinned blocks through which host data passes (the other side is an arena, of either kind); a
// block is used again when its copy has run.
class StagingRing {
 public:
  StagingRing() {
    for (Block& block : blocks_) {
      TRAINRT_CUDA_CHECK(cudaHostAlloc(block.data.put(), kStagingBytes, cudaHostAllocDefault));
      TRAINRT_CUDA_CHECK(cudaEventCreateWithFlags(block.done.put(), cudaEventDisableTiming));
    }
  }

  void send(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
    for (int64_t sent = 0; sent < bytes; sent += kStagingBytes) {
      Block& block = blocks_[next_];
      next_ = (next_ + 1) % kStagingBlocks;
      const size_t n = static_cast<size_t>(std::min(kStagingBytes, bytes - sent));
      TRAINRT_CUDA_CHECK(cudaEventSynchronize(block.done.get()));
      std::memcpy(block.data.get(), static_cast<const std::byte*>(from) + sent, n);
      TRAINRT_CUDA_CHECK(cudaMemcpyAsync(
          static_cast<std::byte*>(to) + sent, block.data.get(), n, cudaMemcpyDefault, stream));
      TRAINRT_CUDA_CHECK(cudaEventRecord(block.done.get(), stream));
    }
  }

  void receive(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
    for (int64_t got = 0; got < bytes; got += kStagingBytes) {
      Block& block = blocks_[next_];
      next_ = (next_ + 1) % kStagingBlocks;
      const size_t n = static_cast<size_t>(std::min(kStagingBytes, bytes - got));
      TRAINRT_CUDA_CHECK(cudaMemcpyAsync(block.data.get(),
                                         static_cast<const std::byte*>(from) + got,
                                         n,
                                         cudaMemcpyDefault,
                                         stream));
      TRAINRT_CUDA_CHECK(cudaStreamSynchronize(stream));
      std::memcpy(static_cast<std::byte*>(to) + got, block.data.get(), n);
    }
  }

 private:
  struct Block {
    cuda::PinnedMemory data;
    Event done;
  };
  std::array<Block, kStagingBlocks> blocks_;
  size_t next_ = 0;
};

class RecordedGraph : public RecordedWork {
 public:
  cuda::Owned<cudaGraphExec_t, cudaGraphExecDestroy> graph;
};

// Events to be used again when nobody holds them: what waits for one already waits for the record
// that there was then.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  std::shared_ptr<Event> take() {
    std::unique_ptr<Event> event;
    if (free_.empty()) {
      event = std::make_unique<Event>();
      TRAINRT_CUDA_CHECK(cudaEventCreateWithFlags(event->put(), cudaEventDisableTiming));
    } else {
      event = std::move(free_.back());
      free_.pop_back();
    }
    return {event.release(),
            [pool = shared_from_this()](Event* used) { pool->free_.emplace_back(used); }};
  }

 private:
  std::vector<std::unique_ptr<Event>> free_;
};

class CudaDevice : public Device {
 public:
  CudaDevice(int index,
             const DeviceOptions& options,
             const DeviceSpec& spec,
             std::shared_ptr<AlgorithmCache> algorithms,
             std::shared_ptr<CompiledKernels> kernels)
      : index_(index),
        options_(options),
        selected_(index),
        context_(index, spec, options, std::move(algorithms), std::move(kernels)) {
    add_lane();  // Lane::kCommunication
  }

  std::string name() const override { return concat("cuda:", index_); }
  DeviceContext& context() override { return context_; }
  void attach_thread() override { TRAINRT_CUDA_CHECK(cudaSetDevice(index_)); }

  std::unique_ptr<DeviceBuffer> allocate(int64_t bytes) override;
  std::unique_ptr<DeviceBuffer> allocate_host(int64_t bytes) override {
    return std::make_unique<HostMemory>(bytes);
  }

  void copy_to_device(void* device, const void* host, int64_t bytes) override {
    staging_.send(device, host, bytes, context_.cuda_stream());
  }
  void copy_to_host(void* host, const void* device, int64_t bytes) override {
    staging_.receive(host, device, bytes, context_.cuda_stream());
  }
  void copy_rows(void* to,
                 int64_t to_stride,
                 const void* from,
                 int64_t from_stride,
                 int64_t row_bytes,
                 int64_t rows,
                 Lane lane) override;
  LaneMark mark(Lane lane) override {
    const std::shared_ptr<Event> event = marks_->take();
    TRAINRT_CUDA_CHECK(cudaEventRecord(event->get(), stream_of(lane)));
    return event;
  }
  void follow(Lane lane, const LaneMark& mark) override {
    const auto event = std::static_pointer_cast<Event>(mark);
    TRAINRT_CUDA_CHECK(cudaStreamWaitEvent(stream_of(lane), event->get(), 0));
  }
  void fill_zero(void* device, int64_t bytes) override {
    TRAINRT_CUDA_CHECK(
        cudaMemsetAsync(device, 0, static_cast<size_t>(bytes), context_.cuda_stream()));
  }
  void synchronize() override {
    for (const Stream& lane : lanes_) {
      TRAINRT_CUDA_CHECK(cudaStreamSynchronize(lane.get()));
    }
    TRAINRT_CUDA_CHECK(cudaStreamSynchronize(context_.cuda_stream()));
  }
  void synchronize(Lane lane) override {
    TRAINRT_CUDA_CHECK(cudaStreamSynchronize(stream_of(lane)));
  }
  void profile(bool on) override {
    synchronize();
    if (on) {
      TRAINRT_CUDA_CHECK(cudaProfilerStart());
    } else {
      TRAINRT_CUDA_CHECK(cudaProfilerStop());
    }
    profiles_ = on;
  }
  void begin_node(const std::string& name) override {
    if (profiles_) {
      nvtxRangePushA(name.c_str());
    }
  }
  void end_node() override {
    if (profiles_) {
      nvtxRangePop();
    }
  }
  bool records() const override { return options_.graphs && !profiles_; }
  std::unique_ptr<RecordedWork> record(const std::function<void()>& ask) override;
  void replay(RecordedWork& work) override {
    TRAINRT_CUDA_CHECK(
        cudaGraphLaunch(dynamic_cast<RecordedGraph&>(work).graph.get(), context_.cuda_stream()));
  }
  std::unique_ptr<Communicator> make_communicator(Communicator& group) override {
    NcclPlace place;
    place.device = index_;
    place.stream = stream_of(Lane::kCommunication);
    place.deadline = options_.deadline;
    place.add_lane = [this] {
      const Lane lane = add_lane();
      return std::pair(lane, stream_of(lane));
    };
    return make_nccl_communicator(group, place);
  }

 private:
  void copy_bytes(void* to, const void* from, int64_t bytes, Lane lane) {
    TRAINRT_CUDA_CHECK(
        cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_of(lane)));
  }

  // Before any other member allocates on the device.
  struct Selected {
    explicit Selected(int index) { TRAINRT_CUDA_CHECK(cudaSetDevice(index)); }
  };
  cudaStream_t stream_of(Lane lane) {
    return lane == Lane::kCompute ? context_.cuda_stream()
                                  : lanes_.at(static_cast<size_t>(lane) - 1).get();
  }
  // Communication comes first wherever both could run: its few thread blocks would otherwise wait
  // until those of the kernel that computes have all begun.
  Lane add_lane() {
    int least = 0, greatest = 0;
    TRAINRT_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    lanes_.emplace_back();
    TRAINRT_CUDA_CHECK(
        cudaStreamCreateWithPriority(lanes_.back().put(), cudaStreamNonBlocking, greatest));
    return static_cast<Lane>(lanes_.size());
  }

  int index_;
  DeviceOptions options_;
  Selected selected_;
  Context context_;
  std::deque<Stream> lanes_;  // after that of computation
  std::shared_ptr<EventPool> marks_ = std::make_shared<EventPool>();
  bool profiles_ = false;
  StagingRing staging_;
};

// Rows of more than kMaxPitch bytes are no rows to CUDA, and are worth a call each.
void CudaDevice::copy_rows(void* to,
                           int64_t to_stride,
                           const void* from,
                           int64_t from_stride,
                           int64_t row_bytes,
                           int64_t rows,
                           Lane lane) {
  if (to_stride == row_bytes && from_stride == row_bytes) {
    copy_bytes(to, from, row_bytes * rows, lane);
  } else if (std::max(to_stride, from_stride) > kMaxPitch) {
    for (int64_t row = 0; row < rows; ++row) {
      copy_bytes(static_cast<std::byte*>(to) + row * to_stride,
                 static_cast<const std::byte*>(from) + row * from_stride,
                 row_bytes,
                 lane);
    }
  } else {
    TRAINRT_CUDA_CHECK(cudaMemcpy2DAsync(to,
                                         static_cast<size_t>(to_stride),
                                         from,
                                         static_cast<size_t>(from_stride),
                                         static_cast<size_t>(row_bytes),
                                         static_cast<size_t>(rows),
                                         cudaMemcpyDefault,
                                         stream_of(lane)));
  }
}

// Other threads, as those that watch communicators, go on calling the runtime meanwhile.
std::unique_ptr<RecordedWork> CudaDevice::record(const std::function<void()>& ask) {
  const cudaStream_t stream = context_.cuda_stream();
  Owned<cudaGraph_t, cudaGraphDestroy> graph;
  TRAINRT_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  try {
    ask();
    TRAINRT_CUDA_CHECK(cudaStreamEndCapture(stream, graph.put()));
  } catch (Error& error) {
    static_cast<void>(cudaStreamEndCapture(stream, graph.put()));
    error.add_context("recording kernels as a CUDA graph; --cuda-graphs off runs them one by one");
    throw;
  } catch (...) {
    static_cast<void>(cudaStreamEndCapture(stream, graph.put()));
    throw;
  }
  auto recorded = std::make_unique<RecordedGraph>();
  TRAINRT_CUDA_CHECK(cudaGraphInstantiate(recorded->graph.put(), graph.get(), 0));
  return recorded;
}

std::unique_ptr<DeviceBuffer> CudaDevice::allocate(int64_t bytes) {
  size_t free_bytes = 0, total_bytes = 0;
  attach_thread();
  TRAINRT_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  const char* advice =
      ". Use a smaller --micro-batch-size, --recompute full, --zero, or more devices";
  TRAINRT_REQUIRE(!options_.memory_limit || bytes <= *options_.memory_limit,
                  kInfeasiblePlan,
                  name(),
                  ": ",
                  bytes,
                  " bytes are needed and the device's memory limit is ",
                  *options_.memory_limit,
                  " bytes, short by ",
                  bytes - *options_.memory_limit,
                  advice);
  const int64_t reserved = options_.communicator_bytes;
  TRAINRT_REQUIRE(bytes + reserved <= static_cast<int64_t>(free_bytes),
                  kOutOfMemory,
                  name(),
                  ": the plan needs ",
                  bytes,
                  " bytes, ",
                  reserved > 0 ? concat("and NCCL about ", reserved, " beside them, ") : "",
                  free_bytes,
                  " of ",
                  total_bytes,
                  " are free, short by ",
                  bytes + reserved - static_cast<int64_t>(free_bytes),
                  " bytes. Other programs on this GPU hold the rest (nvidia-smi shows them)",
                  advice);
  void* data = nullptr;
  TRAINRT_CUDA_CHECK(cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(bytes, 1))));
  return std::make_unique<DeviceMemory>(index_, data, bytes);
}

class Module : public CudaModule {
 public:
  std::string versions() const override { return cuda_library_versions(); }

  std::vector<CudaDeviceInfo> devices() const override {
    std::vector<CudaDeviceInfo> list;
    for (int i = 0; i < device_count(); ++i) {
      const cudaDeviceProp properties = properties_of(i);
      list.push_back({properties.name,
                      isa_of(properties),
                      static_cast<int64_t>(properties.totalGlobalMem),
                      uuid_of(properties)});
    }
    return list;
  }

  DeviceSpec device_spec(int index) const override { return spec_of(index, {}); }

  std::unique_ptr<Device> make_device(int index, const DeviceOptions& options) const override {
    const DeviceSpec spec = spec_of(index, options);
    require_sound_cudnn();
    const std::string& path = options.algorithm_cache;
    return std::make_unique<CudaDevice>(index,
                                        options,
                                        spec,
                                        shared(algorithms_, path, path),
                                        shared(kernels_,
                                               concat(spec.isa, ' ', path),
                                               spec.isa,
                                               path.empty() ? "" : path + ".kernels"));
  }

 private:
  template <typename T>
  using Known = std::map<std::string, std::weak_ptr<T>>;

  // The devices of a process share what they have measured and compiled.
  template <typename T, typename... Arguments>
  std::shared_ptr<T> shared(Known<T>& all,
                            const std::string& key,
                            const Arguments&... made_of) const {
    const std::lock_guard lock(mutex_);
    std::weak_ptr<T>& known = all[key];
    std::shared_ptr<T> found = known.lock();
    if (found == nullptr) {
      known = found = std::make_shared<T>(made_of...);
    }
    return found;
  }

  mutable std::mutex mutex_;
  mutable Known<AlgorithmCache> algorithms_;
  mutable Known<CompiledKernels> kernels_;
};

}  // namespace

}  // namespace trainrt

extern "C" uint64_t trainrt_cuda_interface() {
  return trainrt::kModuleInterface;
}

extern "C" const trainrt::CudaModule* trainrt_cuda_module() {
  static const trainrt::Module module;
  return &module;
}
