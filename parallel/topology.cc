// Links are named by generation. Rates are the vendors' figures per direction; NVLink counts the
// sum over a device's links, network names count one port.
#include "parallel/topology.h"

#include <algorithm>
#include <map>

#include "graph/base/error.h"

namespace trainrt {

namespace {

const std::vector<LinkType>& links() {
  static const std::vector<LinkType> kLinks = {
      {"nvlink1", LinkKind::kNvLink, 80e9},
      {"nvlink2", LinkKind::kNvLink, 150e9},
      {"nvlink3", LinkKind::kNvLink, 300e9},
      {"nvlink4", LinkKind::kNvLink, 450e9},
      {"nvlink4-mesh", LinkKind::kNvLink, 450e9},  // four devices wired pairwise, without a switch
      {"nvlink5", LinkKind::kNvLink, 900e9},
      {"nvlink-bridge", LinkKind::kNvLink, 50e9},
      {"pcie3", LinkKind::kPcie, 16e9},
      {"pcie4", LinkKind::kPcie, 32e9},
      {"pcie5", LinkKind::kPcie, 64e9},
      {"shared-memory", LinkKind::kSharedMemory, 10e9},
      {"infiniband-edr", LinkKind::kNetwork, 12.5e9},
      {"infiniband-hdr100", LinkKind::kNetwork, 12.5e9},
      {"infiniband-hdr", LinkKind::kNetwork, 25e9},
      {"infiniband-ndr", LinkKind::kNetwork, 50e9},
      {"infiniband-xdr", LinkKind::kNetwork, 100e9},
      {"slingshot-200", LinkKind::kNetwork, 25e9},
      {"omni-path-100", LinkKind::kNetwork, 12.5e9},
      {"ethernet-1g", LinkKind::kNetwork, 0.125e9},
      {"ethernet-10g", LinkKind::kNetwork, 1.25e9},
      {"ethernet-25g", LinkKind::kNetwork, 3.125e9},
      {"ethernet-40g", LinkKind::kNetwork, 5e9},
      {"ethernet-50g", LinkKind::kNetwork, 6.25e9},
      {"ethernet-100g", LinkKind::kNetwork, 12.5e9},
      {"ethernet-200g", LinkKind::kNetwork, 25e9},
      {"ethernet-400g", LinkKind::kNetwork, 50e9},
  };
  return kLinks;
}

}  // namespace

double DeviceType::peak_flops(const std::string& precision) const {
  const auto found = flops.find(precision);
  TRAINRT_REQUIRE(found != flops.end(),
                  kInvalidArgument,
                  "device type '",
                  name,
                  "' has no rate for precision ",
                  precision,
                  "; give flops: {",
                  precision,
                  ": ...} in the cluster file, or choose another --precision");
  return found->second * speed;
}

const DeviceType& Topology::type_of(int device_index) const {
  return types.at(static_cast<size_t>(device(device_index).type));
}

const Host& Topology::host_of(int device_index) const {
  return hosts.at(static_cast<size_t>(device(device_index).host));
}

int64_t Topology::capacity_bytes(int device_index) const {
  return type_of(device_index).memory_bytes;
}

int64_t Topology::reserved_bytes(int device_index) const {
  return type_of(device_index).reserved_bytes + device(device_index).extra_reserved_bytes;
}

bool Topology::is_uniform() const {
  for (const TopologyDevice& entry : devices) {
    if (entry.type != devices[0].type ||
        entry.extra_reserved_bytes != devices[0].extra_reserved_bytes) {
      return false;
    }
  }
  for (const Host& host : hosts) {
    if (host.devices.size() != hosts[0].devices.size() || !(host.intra == hosts[0].intra) ||
        !(host.inter == hosts[0].inter) || host.num_nics != hosts[0].num_nics) {
      return false;
    }
  }
  return true;
}

void Topology::add_host(const std::vector<int>& device_types,
                        const LinkType& intra,
                        const LinkType& inter,
                        int num_nics) {
  Host host;
  host.name = concat("host", hosts.size());
  host.intra = intra;
  host.inter = inter;
  host.num_nics = num_nics;
  for (size_t i = 0; i < device_types.size(); ++i) {
    TopologyDevice entry;
    entry.type = device_types[i];
    entry.host = static_cast<int>(hosts.size());
    entry.local_index = static_cast<int>(i);
    const bool cpu = types.at(static_cast<size_t>(entry.type)).is_cpu();
    entry.name = concat(cpu ? "cpu:" : "cuda:", i);
    host.devices.push_back(num_devices());
    devices.push_back(std::move(entry));
  }
  hosts.push_back(std::move(host));
}

int Topology::add_type(const DeviceType& type) {
  const auto found = std::find(types.begin(), types.end(), type);
  if (found != types.end()) {
    return static_cast<int>(found - types.begin());
  }
  types.push_back(type);
  return static_cast<int>(types.size()) - 1;
}

GroupLinks group_links(const Topology& topology, const std::vector<int>& devices, int concurrent) {
  TRAINRT_CHECK(!devices.empty() && concurrent >= 1, "an empty group");
  std::map<int, int> ranks_on_host;
  for (const int device : devices) {
    ++ranks_on_host[topology.device(device).host];
  }
  GroupLinks group;
  group.num_ranks = static_cast<int>(devices.size());
  group.num_hosts = static_cast<int>(ranks_on_host.size());
  group.host_bandwidth = -1;
  for (const auto& [index, ranks] : ranks_on_host) {
    const Host& host = topology.hosts[static_cast<size_t>(index)];
    group.ranks_per_host = std::max(group.ranks_per_host, ranks);
    if (group.intra.bandwidth == 0 || host.intra.bandwidth < group.intra.bandwidth) {
      group.intra = host.intra;
    }
    if (group.inter.bandwidth == 0 || host.inter.bandwidth < group.inter.bandwidth) {
      group.inter = host.inter;
    }
    // A rank drives one network card; the cards of a host are shared by its devices, and by the
    // groups that talk at the same time.
    const double cards = std::max(
        1.0, static_cast<double>(host.num_nics) / static_cast<double>(host.devices.size()));
    const double own =
        std::min(host.network_bandwidth() / concurrent, host.inter.bandwidth * cards * ranks);
    if (group.host_bandwidth < 0 || own < group.host_bandwidth) {
      group.host_bandwidth = own;
    }
  }
  return group;
}

LinkType find_link(const std::string& name) {
  for (const LinkType& link : links()) {
    if (link.name == name) {
      return link;
    }
  }
  TRAINRT_FAIL(kInvalidArgument,
               "unknown link type '",
               name,
               "'",
               did_you_mean(name, link_names()),
               "; known: nvlink1..5, pcie3..5, infiniband-{edr,hdr,ndr}, ethernet-{1..400}g");
}

const std::vector<std::string>& efficiency_names() {
  static const std::vector<std::string> kNames = {"matmul",
                                                  "small_tile_loss",
                                                  "prologue_k",
                                                  "attention",
                                                  "roofline_leak",
                                                  "memory",
                                                  "memory_ramp_bytes",
                                                  "vector",
                                                  "launch_seconds",
                                                  "gap_seconds",
                                                  "overlap_slowdown"};
  return kNames;
}

std::vector<std::string> link_names() {
  std::vector<std::string> names;
  for (const LinkType& link : links()) {
    names.push_back(link.name);
  }
  return names;
}

}  // namespace trainrt
