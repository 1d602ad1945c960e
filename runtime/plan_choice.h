// How the run is split: the plan that the flags ask for.
#pragma once

#include <vector>

#include "parallel/plan.h"
#include "runtime/device.h"
#include "runtime/options.h"
#include "runtime/training_job.h"

namespace trainrt {

// One entry per rank of this machine, from --devices, --cluster and --threads.
std::vector<DeviceOptions> local_devices(const Options& options);

// A plan for steps of `num_samples` samples: --plan, else what --dp, --tp, --pp pin. Throws
// kInvalidArgument for pins that contradict each other or the number of devices.
Plan choose_plan(const Options& options, const TrainingJob& job, int num_devices);

// The same plan for a step of another size: shares in the same proportion.
Plan resize_plan(const Plan& plan, int64_t num_samples);

}  // namespace trainrt
