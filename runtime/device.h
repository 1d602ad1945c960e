// A rank's device: memory and the place where kernels run. The seam between the executor and a back
// end (cpu_device, cuda_device), and the one at which tests put limits and failures.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "graph/kernel.h"

namespace trainrt {

// Memory obtained from a device; freed with the object.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual std::byte* data() = 0;
  virtual int64_t bytes() const = 0;
};

struct DeviceOptions {
  int threads = 1;
  std::optional<int64_t> memory_limit;  // bytes; a larger arena is refused with kInfeasiblePlan
  double speed = 1.0;                   // < 1: every kernel is stretched to kernel time / speed
  bool reference_kernels = false;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;  // "cpu:0", "cuda:1"
  virtual DeviceContext& context() = 0;
  // Throws kInfeasiblePlan above the memory limit, kOutOfMemory when the machine has no more; both
  // with asked, used and limit.
  virtual std::unique_ptr<DeviceBuffer> allocate(int64_t bytes) = 0;
  virtual void copy_to_device(void* device, const void* host, int64_t bytes) = 0;
  virtual void copy_to_host(void* host, const void* device, int64_t bytes) = 0;
  virtual void fill_zero(void* device, int64_t bytes) = 0;
  virtual void synchronize() = 0;

  // To be called once on each thread that will run kernels, before the first of them.
  virtual void attach_thread() {}
  // Kernels take kernel time / speed: the executor waits for the rest.
  virtual double speed() const { return 1.0; }
};

std::unique_ptr<Device> make_cpu_device(int index, const DeviceOptions& options);

// What make_cpu_device's device will call itself: programs are compiled before a device exists.
DeviceSpec cpu_device_spec(const DeviceOptions& options);

}  // namespace trainrt
