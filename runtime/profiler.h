// Measures what this machine's devices reach, in the terms of the planner's cost model: products,
// streams, the floor of a kernel call, and the collectives between ranks that share the machine.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "runtime/device.h"

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
  double link_bandwidth = 0;  // bytes/s in one direction between two ranks; 0 for one device
};

// All devices are measured at the same time, as a run uses them: `devices` entries share the
// machine's memory bandwidth and caches. Takes some seconds.
MachineProfile profile_machine(const std::vector<DeviceOptions>& devices);

// A cluster file (CONTRACT section 3) with this machine as its one host; `name` is the device
// type's.
std::string profile_yaml(const MachineProfile& profile, const std::string& name);

}  // namespace trainrt
