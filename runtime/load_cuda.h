// What the CUDA back end offers to the rest of the runtime, and how it is found: a module beside
// the program, opened when somebody first asks for it, so that runs on the CPU pay nothing and
// start on machines without a driver.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device.h"

namespace trainrt {

struct CudaDeviceInfo {
  std::string name;  // "NVIDIA H100 80GB HBM3"
  std::string isa;   // "sm_90"
  int64_t memory_bytes = 0;
  std::string uuid;  // unlike any other GPU's
};

class CudaModule {
 public:
  virtual ~CudaModule() = default;
  // "driver 13.0, runtime 13.0, cuBLAS 13.1.0, cuDNN 9.19.0, NCCL 2.28.9"
  virtual std::string versions() const = 0;
  // Throws kDevice: no device, a driver too old for the runtime.
  virtual std::vector<CudaDeviceInfo> devices() const = 0;
  // Throws kDevice for a device that does not exist or an architecture that was not built for.
  virtual DeviceSpec device_spec(int index) const = 0;
  virtual std::unique_ptr<Device> make_device(int index, const DeviceOptions& options) const = 0;
};

// Has CUDA keep all lanes apart (parallel/message_lanes.h), which it does for those that start
// after this; with a warning where the environment says that it shall not. cuda_module() calls it.
void keep_lanes_apart();

// Has NCCL add in one order every time, as it does unless an NVSwitch adds for it; before its first
// call.
void keep_sums_in_order();

// Opens the driver, then the module. Throws kDevice and says which library is missing; the answer
// of the first call is kept.
const CudaModule& cuda_module();

// "cuda" or "cuda:0,2": the indices asked for; all devices for the former. Throws kInvalidArgument
// for anything else, and for a device that is not there.
std::vector<int> cuda_device_indices(const std::string& devices);
bool names_cuda(const std::string& devices);

}  // namespace trainrt
