// The devices of a run, and which rank runs on which of them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "parallel/plan.h"
#include "parallel/topology.h"
#include "runtime/device.h"
#include "runtime/options.h"

namespace trainrt {

// The processes of a run, each of which is a rank; hosts empty: one process runs all ranks.
struct Processes {
  std::vector<std::string> hosts = {};  // by rank
  int own_rank = 0;                     // of this process

  int count() const { return hosts.empty() ? 1 : static_cast<int>(hosts.size()); }
  int local_count() const;         // on this process's host
  int local_rank(int rank) const;  // among those of its host
};

// From --devices, --cluster and --threads, in the cluster's order; as many as there are ranks.
std::vector<DeviceOptions> run_devices(const Options& options, const Processes& processes);

// GPUs of this machine as a cluster, if the catalogue knows what they can do and all are of one
// type: with the memory that they have, and linked as is usual in a host of such. They are planned
// for then, within that memory and with the dims padded that it is worth on them.
std::optional<Topology> known_gpus(const std::vector<DeviceOptions>& devices);

// Where this process is, of several: processes of one place can be each other's rank, for each of
// them has all devices of the place. A CPU rank's is its host, and a GPU's, too, unless the
// launcher lets each process see but one.
std::string device_place(const Options& options, const Processes& processes);

// By rank, as the plan assigns them. `places`: of every process, by rank, where there are several.
// Throws kInvalidArgument for a plan that wants a rank where its process is not.
std::vector<DeviceOptions> devices_of_ranks(const Options& options,
                                            const Plan& plan,
                                            const std::vector<DeviceOptions>& devices,
                                            const std::vector<std::string>& places);

// The device that a rank of a plan for `topology` would run on: as run_devices() has it where it
// is a CPU.
DeviceSpec planned_device_spec(const Options& options, const Topology& topology, int device);

}  // namespace trainrt
