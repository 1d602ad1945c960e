#include "runtime/device.h"

#include "runtime/load_cuda.h"

namespace trainrt {

std::unique_ptr<RecordedWork> Device::record(const std::function<void()>&) {
  TRAINRT_FAIL(kInternal, name(), " records no work");
}

void Device::replay(RecordedWork&) {
  TRAINRT_FAIL(kInternal, name(), " records no work");
}

std::unique_ptr<Device> make_device(const DeviceOptions& options) {
  return options.cuda_index ? cuda_module().make_device(*options.cuda_index, options)
                            : make_cpu_device(options.index, options);
}

DeviceSpec device_spec(const DeviceOptions& options) {
  return options.cuda_index ? cuda_module().device_spec(*options.cuda_index)
                            : cpu_device_spec(options);
}

}  // namespace trainrt
