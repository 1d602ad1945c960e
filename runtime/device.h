// A rank's device: memory and the place where kernels run. The seam between the executor and a back
// end (cpu_device, cuda_device), and the one at which tests put limits and failures.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "graph/kernel.h"
#include "parallel/communicator.h"

namespace trainrt {

// Memory obtained from a device; freed with the object.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual std::byte* data() = 0;
  virtual int64_t bytes() const = 0;
};

struct DeviceOptions {
  int index = 0;  // among the run's devices
  int threads = 1;
  std::optional<int64_t> memory_limit;  // bytes; a larger arena is refused with kInfeasiblePlan
  double speed = 1.0;                   // < 1: every kernel is stretched to kernel time / speed
  bool reference_kernels = false;
  std::optional<int> cuda_index;   // the GPU of this number; none: a share of the CPU
  bool deterministic = false;      // CUDA: only algorithms that give equal bits every time
  std::string algorithm_cache;     // CUDA: file of measured choices; "": none
  bool graphs = true;              // CUDA: kernels are recorded as graphs and replayed
  bool tf32 = false;               // CUDA: float32 products may round their operands to TF32
  int64_t communicator_bytes = 0;  // CUDA: to be left free beside the arena
  std::chrono::milliseconds deadline = std::chrono::seconds(60);  // of collectives
};

// All that was asked of a lane when it was made; null on a CPU.
using LaneMark = std::shared_ptr<void>;

// Work that a device has recorded.
class RecordedWork {
 public:
  virtual ~RecordedWork() = default;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cpu:0", "cuda:1"
  virtual DeviceContext& context() = 0;
  // Throws kInfeasiblePlan above the memory limit, kOutOfMemory when the machine has no more; both
  // with asked, used and limit.
  virtual std::unique_ptr<DeviceBuffer> allocate(int64_t bytes) = 0;
  // Zeros in the host's memory, on which the device's kernels and copies work too; no limit counts
  // them. Any attached thread may ask.
  virtual std::unique_ptr<DeviceBuffer> allocate_host(int64_t bytes) = 0;
  virtual void copy_to_device(void* device, const void* host, int64_t bytes) = 0;
  virtual void copy_to_host(void* host, const void* device, int64_t bytes) = 0;
  virtual void fill_zero(void* device, int64_t bytes) = 0;
  // On the device: `rows` runs of `row_bytes`, `to_stride` and `from_stride` bytes apart. The runs
  // must not overlap. Everything above is asked of Lane::kCompute.
  virtual void copy_rows(void* to,
                         int64_t to_stride,
                         const void* from,
                         int64_t from_stride,
                         int64_t row_bytes,
                         int64_t rows,
                         Lane lane) = 0;
  void copy(void* to, const void* from, int64_t bytes, Lane lane = Lane::kCompute) {
    copy_rows(to, bytes, from, bytes, bytes, 1, lane);
  }
  // What is asked of `lane` from now on runs after what `mark` stands for, or all that has been
  // asked of `earlier` so far.
  virtual LaneMark mark(Lane lane) = 0;
  virtual void follow(Lane lane, const LaneMark& mark) = 0;
  void follow(Lane lane, Lane earlier) { follow(lane, mark(earlier)); }
  // Waits until all lanes, or this one, have done all that was asked of them.
  virtual void synchronize() = 0;
  virtual void synchronize(Lane lane) = 0;

  // Collective over `group`: a communicator between the same ranks for tensors in the memory of
  // their devices, working on lanes of this one; null where `group` itself can read that memory.
  virtual std::unique_ptr<Communicator> make_communicator(Communicator& group) = 0;

  // Whether work can be recorded: what `ask` asks of Lane::kCompute is not done but kept, to be
  // done as often as it is replayed, with the same addresses and numbers.
  virtual bool records() const { return false; }
  virtual std::unique_ptr<RecordedWork> record(const std::function<void()>& ask);
  virtual void replay(RecordedWork& work);

  // To be called once on each thread that will run kernels, before the first of them.
  virtual void attach_thread() {}
  // What a profiler is to record of the device, and which node it works for.
  virtual void profile(bool) {}
  virtual void begin_node(const std::string&) {}
  virtual void end_node() {}

  // Kernels take kernel time / speed: the executor waits for the rest.
  virtual double speed() const { return 1.0; }
};

std::unique_ptr<Device> make_cpu_device(int index, const DeviceOptions& options);

// What make_cpu_device's device will call itself: programs are compiled before a device exists.
DeviceSpec cpu_device_spec(const DeviceOptions& options);

// CPU or GPU, as the options say. And its spec.
std::unique_ptr<Device> make_device(const DeviceOptions& options);
DeviceSpec device_spec(const DeviceOptions& options);

}  // namespace trainrt
