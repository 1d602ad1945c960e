// NCCL's tuning model. With n ranks on N hosts, ring: bus bandwidth limited by the slowest link of
// the ring, algorithm bandwidth = bus * n / steps (steps = 2(n-1) for all-reduce, n-1 otherwise),
// latency = base + (steps - inter) * intra latency + inter * network latency, inter = 2(N-1) or
// N-1. Double tree (all-reduce): bus / 2, latency = base + 2((n/N - 1) intra + log2(N) inter). NVLS
// (NVSwitch reduces; Hopper and later): one host, twice the bandwidth of a ring for all-reduce.
// Protocols: LL halves the bandwidth for the least latency, LL128 keeps 92 % of it, Simple all.
// Latencies and caps are read from planner/data/nccl_tuning_constants.csv.
//
// Effective link rates: NCCL counts an NVLink 3 as 20 GB/s of 25 and an NVLink 4 as 20.6 of 25
// (graph/topo.h); measured all-reduces reach 229 GB/s of 300 on A100 and 134 of 150 on V100.
// InfiniBand: 44.7 of 50 GB/s (Galvatron's table, 16 GPUs on two hosts), hence 0.9. Omni-Path,
// which NCCL does not reach past host memory: 10.6, 6.8 and 5.1 of 50 GB/s (BigScience's three
// logs), the mean 0.15. TCP over Ethernet: 0.75, from AMP's steps without tensor parallelism (its
// others are predicted better for it). PCIe 4: 24 of 32 GB/s is NCCL's own figure.
#include "planner/collective_cost.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "graph/base/error.h"
#include "parallel/csv.h"
#include "planner/embedded_data.h"

namespace trainrt {

namespace {

using Table = std::map<std::string, std::map<std::string, double>>;

Table read_constants() {
  Table table;
  for (CsvRow& row : parse_csv(embedded_nccl_constants_csv(), "nccl_tuning_constants.csv")) {
    table[row["table"]][row["key"]] = std::stod(row["value"]);
  }
  return table;
}

double constant(const std::string& name, const std::string& key) {
  static const Table kTable = read_constants();
  const auto group = kTable.find(name);
  TRAINRT_CHECK(group != kTable.end() && group->second.count(key) != 0, name, " ", key);
  return group->second.at(key);
}

std::string generation(const std::string& architecture) {
  if (architecture == "hopper") {
    return "Hopper";
  }
  if (architecture == "blackwell") {
    return "Blackwell";
  }
  return architecture == "volta" || architecture == "turing" ? "Volta" : "Ampere";
}

std::string hosts_key(int num_hosts) {
  return num_hosts == 1 ? "1 node" : num_hosts == 2 ? "2 nodes" : "4+ nodes";
}

struct Option {
  double bus = 0;      // bytes/s
  double latency = 0;  // seconds
  double factor = 1;   // algorithm bandwidth over bus bandwidth
};

// What NCCL's table leaves out. A collective is a kernel with a launch of its own; and protocols
// that move blocks must fill the ring before it runs at full rate, which measured A100 all-reduces
// show as 25 to 50 us on top of the table between 1 and 64 MiB.
constexpr double kLaunchSeconds = 10e-6;
constexpr double kPipelineFillSeconds = 25e-6;

// Copying through host memory costs a gloo or thread rank about this much per step.
constexpr double kSharedMemoryLatency = 20e-6;

struct Model {
  Collective kind;
  const GroupLinks& group;
  std::string gen;

  bool all_reduce() const { return kind == Collective::kAllReduce; }
  int steps() const { return (all_reduce() ? 2 : 1) * (group.num_ranks - 1); }
  double num_channels() const {  // NCCL opens about one channel per 10 GB/s of bus bandwidth
    return std::clamp(std::floor(bus_bandwidth() / 10e9), 2.0, 24.0);
  }

  // The ring's slowest link. A host's network is entered once per channel; together the channels
  // use what the group gets of the host's cards.
  double bus_bandwidth() const {
    double bus = 1e30;
    if (group.ranks_per_host > 1) {
      bus = effective_intra_bandwidth(group.intra);
    }
    if (group.num_hosts > 1) {
      bus = std::min(bus, effective_inter_bandwidth(group.inter, group.host_bandwidth));
    }
    return bus;
  }

  double latency_of(const char* where, const std::string& algorithm, const char* protocol) const {
    return constant("hwLatency", concat(where, "/", algorithm, "/", protocol)) * 1e-6;
  }
  const char* intra_name() const {
    return group.intra.kind == LinkKind::kNvLink ? "NVLink" : "PCI";
  }

  Option ring(const char* protocol) const {
    Option option;
    const double bus = bus_bandwidth();
    const double channels = num_channels();
    option.bus = bus;
    if (std::string(protocol) == "LL") {
      option.bus =
          std::min(bus / 2, constant("llMaxBw", ll_row() + "/" + hosts_key(group.num_hosts)) * 1e9);
    } else if (std::string(protocol) == "LL128") {
      option.bus = std::min(
          0.92 * bus,
          channels * 1e9 * constant("perChMaxRingLL128Bw", gen + "/" + hosts_key(group.num_hosts)));
    }
    option.latency = std::string(protocol) == "LL" ? 0 : kPipelineFillSeconds;
    option.factor = static_cast<double>(group.num_ranks) / steps();
    const int inter = (all_reduce() ? 2 : 1) * (group.num_hosts - 1);
    option.latency += constant("baseLatency", concat("Ring/", protocol)) * 1e-6 +
                      (steps() - inter) * latency_of(intra_name(), "Ring", protocol) +
                      inter * latency_of("Net", "Ring", protocol);
    return option;
  }

  Option tree(const char* protocol) const {
    Option option;
    const double bus = bus_bandwidth();
    const double channels = num_channels();
    const std::string row = gen + "/" + hosts_key(group.num_hosts);
    option.bus = std::min(0.92 * bus, channels * 1e9 * constant("perChMaxTreeBw", row));
    if (std::string(protocol) == "LL") {
      option.bus = std::min(option.bus / 3.8,
                            constant("llMaxBw", ll_row() + "/" + hosts_key(group.num_hosts)) * 1e9);
    } else if (std::string(protocol) == "LL128") {
      option.bus =
          std::min(option.bus * 0.9, channels * 1e9 * constant("perChMaxTreeLL128Bw", row));
    }
    option.factor = 0.5;
    option.latency =
        constant("baseLatency", concat("Tree/", protocol)) * 1e-6 +
        2 * ((group.num_ranks / static_cast<double>(group.num_hosts) - 1) *
                 latency_of(intra_name(), "Tree", protocol) +
             std::log2(static_cast<double>(group.num_hosts)) * latency_of("Net", "Tree", protocol));
    return option;
  }

  Option nvls() const {
    Option option;
    const double channels = 16;
    option.bus = effective_intra_bandwidth(group.intra) * constant("nvlsEfficiency", gen) *
                 (channels - 1) / channels * (all_reduce() ? 2 : 1);
    const double n = group.num_ranks;
    option.factor = all_reduce() ? n / (2 * (n - 1)) : n / (n - 1);
    option.latency = constant("hwLatency", "NVLink/NVLS/Simple") * 1e-6;
    return option;
  }

  std::string ll_row() const {
    return gen == "Volta"    ? "Volta or Intel multi-node"
           : gen == "Ampere" ? "Ampere or AMD multi-node"
                             : gen;
  }
};

void offer(const Option& option, double bytes, const std::string& name, CollectiveTime* best) {
  const double seconds = kLaunchSeconds + option.latency + bytes / (option.bus * option.factor);
  if (best->algorithm.empty() || seconds < best->seconds) {
    *best = {seconds, name};
  }
}

}  // namespace

double effective_intra_bandwidth(const LinkType& link) {
  if (link.name == "nvlink2" || link.name == "nvlink1") {
    return 0.88 * link.bandwidth;
  }
  if (link.name == "nvlink5") {
    return 0.67 * link.bandwidth;
  }
  switch (link.kind) {
    case LinkKind::kNvLink:
      return 0.79 * link.bandwidth;
    case LinkKind::kPcie:
      return 0.75 * link.bandwidth;
    case LinkKind::kNetwork:
      return effective_inter_bandwidth(link, link.bandwidth);
    case LinkKind::kSharedMemory:
      return link.bandwidth;
  }
  return link.bandwidth;
}

double effective_inter_bandwidth(const LinkType& link, double raw) {
  const bool sockets = link.name.starts_with("ethernet");
  return (link.name.starts_with("omni-path") ? 0.15 : sockets ? 0.75 : 0.9) * raw;
}

CollectiveTime collective_time(Collective kind,
                               double bytes,
                               const GroupLinks& group,
                               const std::string& architecture) {
  if (group.num_ranks <= 1 || bytes <= 0) {
    return {0, "none"};
  }
  const Model model{kind, group, generation(architecture)};
  CollectiveTime best;
  if (group.intra.kind == LinkKind::kSharedMemory) {
    const double bandwidth =
        group.num_hosts > 1 ? std::min(group.intra.bandwidth,
                                       effective_inter_bandwidth(group.inter, group.host_bandwidth))
                            : group.intra.bandwidth;
    const double n = group.num_ranks;
    const double traffic = (model.all_reduce() ? 2 : 1) * (n - 1) / n;
    return {kSharedMemoryLatency * model.steps() + traffic * bytes / bandwidth, "ring/host"};
  }
  const char* const kProtocols[] = {"LL", "LL128", "Simple"};
  const char* const kNames[] = {"ll", "ll128", "simple"};
  for (int i = 0; i < 3; ++i) {
    // LL128 needs NVLink's ordering of 128-byte stores.
    if (i == 1 && group.intra.kind != LinkKind::kNvLink) {
      continue;
    }
    offer(model.ring(kProtocols[i]), bytes, concat("ring/", kNames[i]), &best);
    if (model.all_reduce()) {
      offer(model.tree(kProtocols[i]), bytes, concat("tree/", kNames[i]), &best);
    }
  }
  const bool nvls = (model.gen == "Hopper" || model.gen == "Blackwell") && group.num_hosts == 1 &&
                    group.num_ranks > 2 && group.intra.kind == LinkKind::kNvLink &&
                    group.intra.name != "nvlink4-mesh" && kind != Collective::kAllToAll &&
                    kind != Collective::kBroadcast;
  if (nvls) {
    offer(model.nvls(), bytes, "nvls/simple", &best);
  }
  return best;
}

double send_time(double bytes, const GroupLinks& pair) {
  if (pair.num_hosts > 1) {
    return constant("hwLatency", "Net/Ring/Simple") * 1e-6 +
           bytes / effective_inter_bandwidth(pair.inter, pair.host_bandwidth);
  }
  if (pair.intra.kind == LinkKind::kSharedMemory) {
    return kSharedMemoryLatency + bytes / pair.intra.bandwidth;
  }
  const char* where = pair.intra.kind == LinkKind::kNvLink ? "NVLink" : "PCI";
  return (constant("baseLatency", "Ring/Simple") +
          constant("hwLatency", concat(where, "/Ring/Simple"))) *
             1e-6 +
         bytes / effective_intra_bandwidth(pair.intra);
}

}  // namespace trainrt
