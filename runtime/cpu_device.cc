// A share of the machine's cores as a device.
//
// Loops are cut into blocks of the caller's grain and the blocks handed to OpenMP threads: which
// thread runs a block is left to chance, what a block holds is not, so results do not depend on the
// number of threads. OpenMP is also what oneDNN uses, hence one pool of threads per rank and no
// fights between the two. The thread count is a property of the calling thread (an OpenMP internal
// control variable), which is why each rank's thread announces itself through attach_thread().
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "runtime/device.h"
#include "runtime/machine.h"

namespace trainrt {

namespace {

constexpr size_t kAlignment = 4096;  // whole pages, and more than any vector unit asks for
constexpr size_t kHugePage = size_t{2} << 20;

std::string cpu_isa() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) {
    return "avx512";
  }
  return __builtin_cpu_supports("avx2") ? "avx2" : "sse";
}

class CpuContext : public DeviceContext {
 public:
  explicit CpuContext(DeviceSpec spec) : spec_(std::move(spec)) {}
  const DeviceSpec& spec() const override { return spec_; }
  void* stream() override { return nullptr; }

  void parallel_for(int64_t n,
                    int64_t grain,
                    const std::function<void(int64_t, int64_t)>& fn) override {
    const int64_t step = std::max<int64_t>(1, grain);
    const int64_t num_blocks = (n + step - 1) / step;
    if (num_blocks <= 1 || spec_.threads == 1) {
      for (int64_t begin = 0; begin < n; begin += step) {
        fn(begin, std::min(n, begin + step));
      }
      return;
    }
#pragma omp parallel for schedule(static) num_threads(spec_.threads)
    for (int64_t block = 0; block < num_blocks; ++block) {
      fn(block * step, std::min(n, (block + 1) * step));
    }
  }

 private:
  DeviceSpec spec_;
};

class CpuDevice : public Device {
 public:
  CpuDevice(int index, const DeviceOptions& options)
      : name_(concat("cpu:", index)), options_(options), context_(cpu_device_spec(options)) {}

  std::string name() const override { return name_; }
  DeviceContext& context() override { return context_; }
  double speed() const override { return options_.speed; }
  void attach_thread() override { omp_set_num_threads(options_.threads); }

  std::unique_ptr<DeviceBuffer> allocate(int64_t bytes) override;
  std::unique_ptr<DeviceBuffer> allocate_host(int64_t bytes) override;

  void copy_to_device(void* device, const void* host, int64_t bytes) override {
    std::memcpy(device, host, static_cast<size_t>(bytes));
  }
  void copy_to_host(void* host, const void* device, int64_t bytes) override {
    std::memcpy(host, device, static_cast<size_t>(bytes));
  }
  void fill_zero(void* device, int64_t bytes) override {
    std::memset(device, 0, static_cast<size_t>(bytes));
  }
  void copy_rows(void* to,
                 int64_t to_stride,
                 const void* from,
                 int64_t from_stride,
                 int64_t row_bytes,
                 int64_t rows,
                 Lane) override {
    for (int64_t row = 0; row < rows; ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * to_stride,
                  static_cast<const std::byte*>(from) + row * from_stride,
                  static_cast<size_t>(row_bytes));
    }
  }
  LaneMark mark(Lane) override { return nullptr; }
  void follow(Lane, const LaneMark&) override {}
  void synchronize() override {}
  void synchronize(Lane) override {}
  std::unique_ptr<Communicator> make_communicator(Communicator&) override { return nullptr; }

 private:
  std::string name_;
  DeviceOptions options_;
  CpuContext context_;
  std::atomic<int64_t> used_{0};
};

class CpuBuffer : public DeviceBuffer {
 public:
  CpuBuffer(void* data, int64_t bytes, std::atomic<int64_t>& used)
      : data_(static_cast<std::byte*>(data)), bytes_(bytes), used_(used) {}
  ~CpuBuffer() override {
    std::free(data_);
    used_ -= bytes_;
  }
  CpuBuffer(const CpuBuffer&) = delete;
  CpuBuffer& operator=(const CpuBuffer&) = delete;
  std::byte* data() override { return data_; }
  int64_t bytes() const override { return bytes_; }

 private:
  std::byte* data_;
  int64_t bytes_;
  std::atomic<int64_t>& used_;
};

std::unique_ptr<DeviceBuffer> CpuDevice::allocate(int64_t bytes) {
  TRAINRT_CHECK(bytes >= 0);
  const int64_t total = used_ += bytes;
  if (options_.memory_limit && total > *options_.memory_limit) {
    used_ -= bytes;
    TRAINRT_FAIL(kInfeasiblePlan,
                 name_,
                 ": ",
                 bytes,
                 " bytes are needed, ",
                 total - bytes,
                 " are in use and the device's memory limit is ",
                 *options_.memory_limit,
                 " bytes, short by ",
                 total - *options_.memory_limit,
                 ". Use a smaller --micro-batch-size, --recompute full, more devices, or raise "
                 "'memory' in the cluster file");
  }
  const size_t wanted = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  const size_t alignment = wanted >= kHugePage ? kHugePage : kAlignment;
  const size_t rounded = (wanted + kAlignment - 1) / kAlignment * kAlignment;
  // Linux hands out more than it has and kills whoever uses it, so it is asked first.
  const int64_t available = available_memory_bytes();
  const bool fits = available == 0 || static_cast<int64_t>(rounded) <= available;
  void* data =
      fits ? std::aligned_alloc(alignment, (rounded + alignment - 1) / alignment * alignment)
           : nullptr;
  if (data == nullptr) {
    used_ -= bytes;
    TRAINRT_FAIL(kOutOfMemory,
                 name_,
                 ": the machine has no room for ",
                 bytes,
                 " bytes (",
                 available,
                 " are available, ",
                 total - bytes,
                 " in use by this rank, limit ",
                 options_.memory_limit ? concat(*options_.memory_limit, " bytes") : "none",
                 "). Use a smaller --micro-batch-size or --recompute full");
  }
  // Matrix products walk megabytes: with small pages they run out of address translations. Only
  // whole huge pages within the buffer are asked for, so no more memory is used. Advice may fail.
  madvise(data, rounded / kHugePage * kHugePage, MADV_HUGEPAGE);
  return std::make_unique<CpuBuffer>(data, bytes, used_);
}

class HostBuffer : public DeviceBuffer {
 public:
  explicit HostBuffer(int64_t bytes)
      : bytes_(bytes), memory_(static_cast<size_t>(bytes) + kAlignment, std::byte{0}) {}
  std::byte* data() override {
    void* start = memory_.data();
    size_t room = memory_.size();
    return static_cast<std::byte*>(
        std::align(kAlignment, static_cast<size_t>(bytes_), start, room));
  }
  int64_t bytes() const override { return bytes_; }

 private:
  int64_t bytes_;
  std::vector<std::byte> memory_;
};

std::unique_ptr<DeviceBuffer> CpuDevice::allocate_host(int64_t bytes) {
  return std::make_unique<HostBuffer>(bytes);
}

}  // namespace

DeviceSpec cpu_device_spec(const DeviceOptions& options) {
  DeviceSpec spec;
  spec.backend = Backend::kCpu;
  spec.isa = cpu_isa();
  spec.threads = options.threads;
  spec.reference_kernels = options.reference_kernels;
  return spec;
}

std::unique_ptr<Device> make_cpu_device(int index, const DeviceOptions& options) {
  TRAINRT_REQUIRE(options.threads >= 1,
                  kInvalidArgument,
                  "--threads must be at least 1, got ",
                  options.threads);
  TRAINRT_REQUIRE(options.speed > 0 && options.speed <= 1,
                  kInvalidArgument,
                  "a CPU device's speed lies in (0, 1], got ",
                  options.speed);
  return std::make_unique<CpuDevice>(index, options);
}

}  // namespace trainrt
