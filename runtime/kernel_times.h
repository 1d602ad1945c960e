// Kernels timed where they will run: small example models are trained for some steps, and every
// kernel's time is put down under its name and size (planner/kernel_sample.h), from which the
// planner predicts those of other models.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/topology.h"
#include "runtime/device.h"

namespace trainrt {

struct KernelTimes {
  std::map<std::string, std::vector<KernelSample>> samples;
  double gap_seconds = 0;  // between two kernels
};

// All ranks of `world` (null: one) run the same at the same time, each on its own device, and
// return the same: the mean over them. Takes about `seconds`, and some for making the models.
KernelTimes time_kernels(const DeviceOptions& device, Communicator* world, double seconds);

}  // namespace trainrt
