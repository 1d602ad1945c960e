// Hosts, devices and links as they are: what the planner plans for. Holds figures from data sheets;
// how far they are reached in practice is the cost model's business (planner/cost_model).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace trainrt {

// A kernel as `trainrt profile` timed it, again and again on the same tensors.
struct KernelSample {
  double batch = 0, m = 0, n = 0, k = 0;  // of its largest product; without one n is a row's length
  double bytes = 0;                       // of its operands
  double seconds = 0;
  bool operator==(const KernelSample&) const = default;
};

// Bytes per second of a stream that comes by again after `working_set` bytes: which cache it is in.
struct StreamSample {
  double working_set = 0;
  double bytes_per_second = 0;
  bool operator==(const StreamSample&) const = default;
};

// One kind of device. Rates are dense peaks in FLOP/s by precision ("fp32", "bf16", ...); a
// precision that is missing is not offered.
struct DeviceType {
  std::string name;
  std::string architecture;  // "ampere", "hopper", ..., "cpu"; chooses the cost constants
  int64_t memory_bytes = 0;
  int64_t reserved_bytes = 0;   // context, kernels, libraries: never ours
  double memory_bandwidth = 0;  // bytes/s
  double speed = 1;             // every rate is multiplied by it
  double sustained = 1;         // matrix clock under the power limit, relative to the full part
  int num_sms = 1;
  std::map<std::string, double> flops;
  // Figures found on such a device that replace its architecture's, by efficiency_names().
  std::map<std::string, double> efficiency;
  // Of a CPU that has been measured: kernels by operator, streams by working set; else empty.
  std::map<std::string, std::vector<KernelSample>> kernels;
  std::vector<StreamSample> streams;

  bool is_cpu() const { return architecture == "cpu"; }
  // The rate at `precision`, times `speed`. Throws kInvalidArgument for a precision that the device
  // lacks, as those before Ampere TF32.
  double peak_flops(const std::string& precision) const;
  bool operator==(const DeviceType&) const = default;
};

struct CallSample {
  double bytes = 0;  // of the whole tensor
  double seconds = 0;
  bool operator==(const CallSample&) const = default;
};

enum class LinkKind : uint8_t { kNvLink, kPcie, kNetwork, kSharedMemory };

// A way between devices. `bandwidth` is the raw rate in one direction: of one device for links
// inside a host, of one network card for links between hosts.
struct LinkType {
  std::string name;
  LinkKind kind = LinkKind::kPcie;
  double bandwidth = 0;  // bytes/s
  // Between CPU ranks of one host, where it has been measured: seconds by bytes, ascending, of
  // "all_reduce" ... from the last rank's call to the last one's return, and of "send" and
  // "receive" when the message is there. A receiver that waits needs `wake_seconds` to notice that
  // it is.
  std::map<std::string, std::vector<CallSample>> calls = {};
  double wake_seconds = 0;
  int measured_ranks = 0;
  bool operator==(const LinkType&) const = default;
};

struct Host {
  std::string name;
  std::vector<int> devices;  // indices into Topology::devices
  LinkType intra;
  LinkType inter;
  int num_nics = 1;
  double network_bandwidth() const { return inter.bandwidth * num_nics; }
};

struct TopologyDevice {
  int type = 0;                      // index into Topology::types
  int host = 0;                      // index into Topology::hosts
  int local_index = 0;               // within the host
  std::string name;                  // "cuda:3", "cpu:0"
  int64_t extra_reserved_bytes = 0;  // the host entry's `reserved`
};

struct Topology {
  std::vector<DeviceType> types;
  std::vector<Host> hosts;
  std::vector<TopologyDevice> devices;

  int num_devices() const { return static_cast<int>(devices.size()); }
  const TopologyDevice& device(int index) const { return devices.at(static_cast<size_t>(index)); }
  const DeviceType& type_of(int device) const;
  const Host& host_of(int device) const;
  int64_t capacity_bytes(int device) const;  // the whole memory
  int64_t reserved_bytes(int device) const;  // type's plus host entry's
  // True when all devices and hosts are alike.
  bool is_uniform() const;

  // Appends a host with one device per entry of `device_types` (indices into types).
  void add_host(const std::vector<int>& device_types,
                const LinkType& intra,
                const LinkType& inter,
                int num_nics);
  // Index of an equal type, which is added when there is none.
  int add_type(const DeviceType& type);
};

// What a set of devices that talk to each other looks like to a collective.
struct GroupLinks {
  int num_ranks = 1;
  int num_hosts = 1;
  int ranks_per_host = 1;  // the most on one host
  LinkType intra;          // the slowest among the hosts concerned
  LinkType inter;
  double host_bandwidth = 0;  // bytes/s per direction that this group gets of a host's network
};

// `concurrent`: how many groups of the same kind share each host's network at the same time.
GroupLinks group_links(const Topology& topology, const std::vector<int>& devices, int concurrent);

// "nvlink3", "infiniband-hdr", "ethernet-25g" ...; throws kInvalidArgument with near names.
LinkType find_link(const std::string& name);
std::vector<std::string> link_names();

// What a device file may say of how near a device comes to its data sheet; planner/cost_model gives
// their meaning, units and ranges.
const std::vector<std::string>& efficiency_names();

}  // namespace trainrt
