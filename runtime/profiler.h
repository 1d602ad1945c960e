// Measures what this machine's devices reach, in the terms of the planner's cost model: kernels by
// name and size, streams by working set, and what the ranks that share the machine send each other.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/topology.h"
#include "runtime/device.h"
#include "runtime/kernel_times.h"

namespace trainrt {

struct MachineProfile {
  int num_devices = 1;
  int threads = 1;                      // per device
  int64_t memory_bytes = 0;             // of the machine
  std::map<std::string, double> flops;  // by precision: the fastest product, FLOP/s of one device
  double matmul_efficiency = 1;         // of that, over the products of ordinary layers
  double memory_bandwidth = 0;          // bytes/s of one device, the fastest stream
  double memory_efficiency = 1;         // of that, over ordinary memory-bound operators
  double vector_flops = 0;              // FLOP/s of element-wise arithmetic
  double launch_seconds = 0;            // the smallest operator, start to end
  std::vector<StreamSample> streams;
  KernelTimes kernels;
  LinkType link;  // between ranks; all 0 for one device
};

// Called by every rank with its own device, and `world` null for one rank alone; all return the
// same. They measure at the same time, as a run uses the machine: its memory bandwidth and caches
// are shared. Takes about `seconds`, and some for making the models that are measured.
MachineProfile profile_machine(const DeviceOptions& device, Communicator* world, double seconds);

// A cluster file (CONTRACT section 3) with this machine as its one host; `name` is the device
// type's.
std::string profile_yaml(const MachineProfile& profile, const std::string& name);

}  // namespace trainrt
