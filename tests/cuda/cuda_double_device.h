// A device of the double, which nothing may be left of when it goes, and whose libraries were asked
// for nothing invalid.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "runtime/load_cuda.h"
#include "tests/cuda_double/cuda_double.h"

namespace trainrt::testing {

class DoubleDevice {
 public:
  explicit DoubleDevice(const DeviceOptions& options = {}) {
    cuda_double::reset();
    device_ = cuda_module().make_device(0, options);
  }
  ~DoubleDevice() {
    device_.reset();
    EXPECT_EQ(cuda_double::alive(), "");
    EXPECT_EQ(cuda_double::misuses(), "");
  }
  DoubleDevice(const DoubleDevice&) = delete;
  DoubleDevice& operator=(const DoubleDevice&) = delete;
  Device& operator*() const { return *device_; }
  Device* operator->() const { return device_.get(); }

 private:
  std::unique_ptr<Device> device_;
};

}  // namespace trainrt::testing
