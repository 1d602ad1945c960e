#include "runtime/rank_devices.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <tuple>

#include "graph/base/log.h"
#include "parallel/cluster_file.h"
#include "parallel/communicator_memory.h"
#include "parallel/device_catalogue.h"
#include "planner/plan_pins.h"
#include "runtime/launcher.h"
#include "runtime/load_cuda.h"
#include "runtime/machine.h"

namespace trainrt {

namespace {

// Devices of "cpu" or "cpu:N".
int num_cpu_ranks(const std::string& devices) {
  if (devices.empty() || devices == "cpu") {
    return 1;
  }
  int count = 0;
  const char* end = devices.data() + devices.size();
  const bool is_cpu = devices.rfind("cpu:", 0) == 0;
  const auto [stop, status] =
      std::from_chars(devices.data() + std::min<size_t>(4, devices.size()), end, count);
  TRAINRT_REQUIRE(is_cpu && status == std::errc() && stop == end && count >= 1 && count <= 1024,
                  kInvalidArgument,
                  "--devices is '",
                  devices,
                  "'; wanted cpu, cpu:N, cuda or cuda:0,1");
  return count;
}

void check_degrees(const Options& options, int num_devices) {
  const int64_t degree = options.dp.value_or(1) * options.tp.value_or(1) * options.pp.value_or(1);
  const bool all = options.dp && options.tp && options.pp;
  TRAINRT_REQUIRE(
      all ? degree == num_devices : num_devices % degree == 0,
      kInvalidArgument,
      "dp ",
      options.dp.value_or(1),
      " x tp ",
      options.tp.value_or(1),
      " x pp ",
      options.pp.value_or(1),
      " needs ",
      all ? "" : "a multiple of ",
      degree,
      " devices, there are ",
      num_devices,
      options.cluster.empty() ? "; --devices cpu:N or --nproc N makes N of this machine" : "");
}

// The GPU of each rank: all that are named, or of several processes each one's own among them. A
// launcher may let each process see but one.
std::vector<int> cuda_indices_of_ranks(const Options& options, const Processes& processes) {
  const std::vector<int> indices = cuda_device_indices(options.devices);
  if (processes.count() == 1) {
    return indices;
  }
  const int local = processes.local_count();
  TRAINRT_REQUIRE(indices.size() == 1 || indices.size() >= static_cast<size_t>(local),
                  kInvalidArgument,
                  "--devices ",
                  options.devices,
                  " are ",
                  indices.size(),
                  " GPUs, but ",
                  local,
                  " processes were started on this machine: each drives one");
  std::vector<int> of_ranks;
  for (int rank = 0; rank < processes.count(); ++rank) {  // those of other machines mean nothing
    of_ranks.push_back(indices[static_cast<size_t>(processes.local_rank(rank)) % indices.size()]);
  }
  return of_ranks;
}

std::vector<DeviceOptions> cuda_rank_devices(const Options& options, const Processes& processes) {
  const std::vector<int> indices = cuda_indices_of_ranks(options, processes);
  std::vector<DeviceOptions> devices(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    devices[i].cuda_index = indices[i];
    devices[i].deterministic = options.deterministic;
    devices[i].graphs = options.cuda_graphs == "on";
    devices[i].algorithm_cache = options.algorithm_cache.empty()
                                     ? cache_file(process_environment(), "algorithms")
                                 : options.algorithm_cache == "none" ? ""
                                                                     : options.algorithm_cache;
    devices[i].tf32 = options.precision == "tf32";
    devices[i].deadline = std::chrono::milliseconds(static_cast<int64_t>(options.deadline * 1000));
  }
  const bool are_known =
      processes.local_count() == processes.count() && known_gpus(devices).has_value();
  TRAINRT_REQUIRE(
      indices.size() == 1 || !options.cluster.empty() || !options.plan.empty() || are_known,
      kInvalidArgument,
      "--devices ",
      options.devices,
      " are ",
      indices.size(),
      " GPUs that are on several hosts, of several types, or not in the catalogue: name what they "
      "are with --cluster (a preset or file), or give a --plan");
  return devices;
}

int threads_per_rank(const Options& options, int local_ranks) {
  return options.threads > 0 ? static_cast<int>(options.threads)
                             : std::max(1, num_usable_cores() / local_ranks);
}

// The index of each rank's device among the run's, as the plan names it. Without a cluster, whose
// devices have names, the plan's own are counted in the order of theirs ("cuda:2" before
// "cuda:10").
std::vector<int> device_order(const Options& options, const Plan& plan) {
  std::vector<int> order(static_cast<size_t>(plan.world_size()));
  std::iota(order.begin(), order.end(), 0);
  if (plan.devices.empty()) {
    return order;
  }
  if (!options.cluster.empty()) {
    Plan named;
    named.devices = plan.devices;
    PlanPins pins;
    pin_plan(named, {"devices"}, "the plan", load_cluster(options.cluster), &pins);
    return pins.device_order;
  }
  std::vector<PlanDevice> devices = plan.devices;
  const auto place = [](const PlanDevice& device) {
    return std::tuple(device.host.size(), device.host, device.device.size(), device.device);
  };
  std::sort(devices.begin(), devices.end(), [&](const PlanDevice& a, const PlanDevice& b) {
    return place(a) < place(b);
  });
  for (size_t i = 0; i < devices.size(); ++i) {
    order[static_cast<size_t>(devices[i].rank)] = static_cast<int>(i);
  }
  return order;
}

}  // namespace

int Processes::local_rank(int rank) const {
  return hosts.empty()
             ? 0
             : static_cast<int>(std::count(
                   hosts.begin(), hosts.begin() + rank, hosts[static_cast<size_t>(rank)]));
}

int Processes::local_count() const {
  return hosts.empty() ? 1
                       : static_cast<int>(std::count(
                             hosts.begin(), hosts.end(), hosts[static_cast<size_t>(own_rank)]));
}

DeviceSpec planned_device_spec(const Options& options, const Topology& topology, int device) {
  if (topology.type_of(device).is_cpu()) {
    DeviceOptions cpu;
    cpu.threads = threads_per_rank(options, topology.num_devices());
    return cpu_device_spec(cpu);
  }
  static const std::map<std::string, std::string> kCapability = {{"volta", "sm_70"},
                                                                 {"turing", "sm_75"},
                                                                 {"ampere", "sm_80"},
                                                                 {"ada", "sm_89"},
                                                                 {"hopper", "sm_90"},
                                                                 {"blackwell", "sm_100"}};
  const auto known = kCapability.find(topology.type_of(device).architecture);
  DeviceSpec spec;
  spec.backend = Backend::kCuda;
  spec.isa = known == kCapability.end() ? "sm_90" : known->second;
  return spec;
}

std::vector<DeviceOptions> run_devices(const Options& options, const Processes& processes) {
  const int num_processes = processes.count();
  std::vector<DeviceOptions> devices;
  for (const char* name : {"profile-steps", "cuda-graphs", "algorithm-cache"}) {
    TRAINRT_REQUIRE(options.flags.count(name) == 0 || names_cuda(options.devices),
                    kInvalidArgument,
                    "--",
                    name,
                    " is for --devices cuda");
  }
  if (names_cuda(options.devices)) {
    devices = cuda_rank_devices(options, processes);
  } else if (!options.cluster.empty()) {
    const Topology topology = load_cluster(options.cluster);
    const bool says_number = options.devices.find(':') != std::string::npos;
    TRAINRT_REQUIRE(!says_number || num_cpu_ranks(options.devices) == topology.num_devices(),
                    kInvalidArgument,
                    "--devices ",
                    options.devices,
                    " and the ",
                    topology.num_devices(),
                    " devices of --cluster ",
                    options.cluster,
                    " disagree; leave --devices out, which the cluster says");
    for (int d = 0; d < topology.num_devices(); ++d) {
      const DeviceType& type = topology.type_of(d);
      TRAINRT_REQUIRE(type.is_cpu(),
                      kDevice,
                      "--cluster ",
                      options.cluster,
                      ": device ",
                      topology.device(d).name,
                      " is a ",
                      type.name,
                      ", which this machine does not have; 'trainrt plan' plans for it");
      DeviceOptions device;
      device.memory_limit = topology.capacity_bytes(d) - topology.reserved_bytes(d);
      device.speed = type.speed;
      devices.push_back(device);
    }
    TRAINRT_REQUIRE(num_processes == 1 || devices.size() == static_cast<size_t>(num_processes),
                    kInvalidArgument,
                    "--cluster ",
                    options.cluster,
                    " has ",
                    devices.size(),
                    " devices, but ",
                    num_processes,
                    " processes were started: each is one rank on one device");
  } else {
    const int num_ranks = num_cpu_ranks(options.devices);
    TRAINRT_REQUIRE(num_processes == 1 || num_ranks == 1,
                    kInvalidArgument,
                    "--devices ",
                    options.devices,
                    " runs ",
                    num_ranks,
                    " ranks as threads, but ",
                    num_processes,
                    " processes were started, each of which is a rank; leave --devices out");
    devices.resize(static_cast<size_t>(num_ranks * num_processes));
  }
  const int ranks = static_cast<int>(devices.size());
  check_degrees(options, ranks);
  const int local_ranks = num_processes == 1 ? ranks : processes.local_count();
  const int threads = threads_per_rank(options, local_ranks);
  // A user may have some ten thousand threads, and each takes a stack.
  constexpr int64_t kMostThreads = 4096;
  TRAINRT_REQUIRE(int64_t{threads} * local_ranks <= kMostThreads,
                  kInvalidArgument,
                  "--threads ",
                  threads,
                  " for each of ",
                  local_ranks,
                  " ranks of this machine are more than ",
                  kMostThreads);
  for (int d = 0; d < ranks; ++d) {
    devices[static_cast<size_t>(d)].index = d;
    devices[static_cast<size_t>(d)].threads = threads;
  }
  return devices;
}

std::optional<Topology> known_gpus(const std::vector<DeviceOptions>& devices) {
  if (devices.empty() || !devices[0].cuda_index) {
    return std::nullopt;
  }
  const std::vector<CudaDeviceInfo> gpus = cuda_module().devices();
  const CudaDeviceInfo& first = gpus.at(static_cast<size_t>(*devices[0].cuda_index));
  std::optional<CatalogueEntry> known = match_device(first.name);
  if (!known) {
    log_info(
        first.name,
        " is not in the catalogue: nothing is planned for it (--cluster FILE says what it is)");
    return std::nullopt;
  }
  known->device.memory_bytes = first.memory_bytes;
  for (const DeviceOptions& device : devices) {
    const CudaDeviceInfo& gpu = gpus.at(static_cast<size_t>(*device.cuda_index));
    if (gpu.name != first.name) {
      return std::nullopt;
    }
    known->device.memory_bytes = std::min(known->device.memory_bytes, gpu.memory_bytes);
  }
  Topology topology;
  const int type = topology.add_type(known->device);
  topology.add_host(
      std::vector<int>(devices.size(), type), known->intra, known->inter, known->num_nics);
  return topology;
}

std::string device_place(const Options& options, const Processes& processes) {
  const bool sees_one =
      names_cuda(options.devices) && cuda_device_indices(options.devices).size() == 1;
  return processes.hosts[static_cast<size_t>(processes.own_rank)] +
         (sees_one ? concat(" rank ", processes.own_rank) : "");
}

std::vector<DeviceOptions> devices_of_ranks(const Options& options,
                                            const Plan& plan,
                                            const std::vector<DeviceOptions>& devices,
                                            const std::vector<std::string>& places) {
  const std::vector<int> order = device_order(options, plan);
  TRAINRT_REQUIRE(
      order.size() <= devices.size() && (places.empty() || order.size() == places.size()),
      kInfeasiblePlan,
      "the plan is for ",
      order.size(),
      " devices, and there are ",
      devices.size(),
      places.empty() ? "" : ", each with a process that has to be a rank",
      "; start as many as the plan is for");
  std::vector<DeviceOptions> result;
  for (size_t rank = 0; rank < order.size(); ++rank) {
    const auto device = static_cast<size_t>(order[rank]);
    TRAINRT_REQUIRE(device < devices.size(),
                    kInvalidArgument,
                    "the plan has rank ",
                    rank,
                    " run on device ",
                    device,
                    " of the cluster, and this run has ",
                    devices.size());
    TRAINRT_REQUIRE(places.empty() || places[device] == places[rank],
                    kInvalidArgument,
                    "the plan has rank ",
                    rank,
                    " run on ",
                    plan.devices.empty() ? "" : plan.devices[rank].host + "/",
                    plan.devices.empty() ? "" : plan.devices[rank].device,
                    ", the device of the process that was started as rank ",
                    device,
                    ", on another host or with another GPU: start the ranks in the plan's order, "
                    "or leave 'devices' out of the plan");
    result.push_back(devices[device]);
    if (result.back().cuda_index) {
      result.back().communicator_bytes =
          communicator_bytes(plan.data_parallel, plan.tensor_parallel, plan.pipeline_parallel);
    }
  }
  return result;
}

}  // namespace trainrt
