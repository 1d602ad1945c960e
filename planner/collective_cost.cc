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

enum Protocol { kLL, kLL128, kSimple, kNumProtocols };
enum Algorithm { kRing, kTree, kNumAlgorithms };
enum Where { kOnNvLink, kOnPci, kOnNet, kNumWheres };
enum Generation { kVolta, kAmpere, kHopper, kBlackwell, kNumGenerations };
constexpr int kNumHostCounts = 3;  // one, two, more

// The table by index: the search prices collectives by the million.
struct Constants {
  double base_latency[kNumAlgorithms][kNumProtocols];
  double latency[kNumWheres][kNumAlgorithms][kNumProtocols];
  double nvls_latency;
  double nvls_efficiency[kNumGenerations] = {};
  double ll[kNumGenerations][kNumHostCounts];
  double ring_ll128[kNumGenerations][kNumHostCounts];
  double tree[kNumGenerations][kNumHostCounts];
  double tree_ll128[kNumGenerations][kNumHostCounts];
};

Constants index_constants() {
  const Table table = read_constants();
  const auto get = [&](const std::string& name, const std::string& key) {
    const auto group = table.find(name);
    TRAINRT_CHECK(group != table.end() && group->second.count(key) != 0, name, " ", key);
    return group->second.at(key);
  };
  const char* const algorithms[] = {"Ring", "Tree"};
  const char* const protocols[] = {"LL", "LL128", "Simple"};
  const char* const wheres[] = {"NVLink", "PCI", "Net"};
  const char* const generations[] = {"Volta", "Ampere", "Hopper", "Blackwell"};
  const char* const ll_rows[] = {
      "Volta or Intel multi-node", "Ampere or AMD multi-node", "Hopper", "Blackwell"};
  const char* const hosts[] = {"1 node", "2 nodes", "4+ nodes"};
  Constants c;
  for (int a = 0; a < kNumAlgorithms; ++a) {
    for (int p = 0; p < kNumProtocols; ++p) {
      c.base_latency[a][p] = get("baseLatency", concat(algorithms[a], "/", protocols[p]));
      for (int w = 0; w < kNumWheres; ++w) {
        c.latency[w][a][p] =
            get("hwLatency", concat(wheres[w], "/", algorithms[a], "/", protocols[p]));
      }
    }
  }
  c.nvls_latency = get("hwLatency", "NVLink/NVLS/Simple");
  c.nvls_efficiency[kHopper] = get("nvlsEfficiency", "Hopper");
  c.nvls_efficiency[kBlackwell] = get("nvlsEfficiency", "Blackwell");
  for (int g = 0; g < kNumGenerations; ++g) {
    for (int h = 0; h < kNumHostCounts; ++h) {
      const std::string key = concat(generations[g], "/", hosts[h]);
      c.ll[g][h] = get("llMaxBw", concat(ll_rows[g], "/", hosts[h]));
      c.ring_ll128[g][h] = get("perChMaxRingLL128Bw", key);
      c.tree[g][h] = get("perChMaxTreeBw", key);
      c.tree_ll128[g][h] = get("perChMaxTreeLL128Bw", key);
    }
  }
  return c;
}

const Constants& constants() {
  static const Constants kConstants = index_constants();
  return kConstants;
}

Generation generation(const std::string& architecture) {
  if (architecture == "hopper") {
    return kHopper;
  }
  if (architecture == "blackwell") {
    return kBlackwell;
  }
  return architecture == "volta" || architecture == "turing" ? kVolta : kAmpere;
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

class Model {
 public:
  Model(Collective kind, const GroupLinks& group, Generation gen)
      : kind_(kind),
        group_(group),
        gen_(gen),
        hosts_(std::min(group.num_hosts, kNumHostCounts) - 1),
        intra_(group.intra.kind == LinkKind::kNvLink ? kOnNvLink : kOnPci),
        bus_(bus_bandwidth()),
        // NCCL opens about one channel per 10 GB/s of bus bandwidth.
        channels_(std::clamp(std::floor(bus_ / 10e9), 2.0, 24.0)) {}

  bool all_reduce() const { return kind_ == Collective::kAllReduce; }
  int steps() const { return (all_reduce() ? 2 : 1) * (group_.num_ranks - 1); }

  Option ring(Protocol protocol) const {
    Option option;
    option.bus = bus_;
    if (protocol == kLL) {
      option.bus = std::min(bus_ / 2, constants().ll[gen_][hosts_] * 1e9);
    } else if (protocol == kLL128) {
      option.bus = std::min(0.92 * bus_, channels_ * 1e9 * constants().ring_ll128[gen_][hosts_]);
    }
    option.latency = protocol == kLL ? 0 : kPipelineFillSeconds;
    option.factor = static_cast<double>(group_.num_ranks) / steps();
    const int inter = (all_reduce() ? 2 : 1) * (group_.num_hosts - 1);
    option.latency += constants().base_latency[kRing][protocol] * 1e-6 +
                      (steps() - inter) * latency_of(intra_, kRing, protocol) +
                      inter * latency_of(kOnNet, kRing, protocol);
    return option;
  }

  Option tree(Protocol protocol) const {
    Option option;
    option.bus = std::min(0.92 * bus_, channels_ * 1e9 * constants().tree[gen_][hosts_]);
    if (protocol == kLL) {
      option.bus = std::min(option.bus / 3.8, constants().ll[gen_][hosts_] * 1e9);
    } else if (protocol == kLL128) {
      option.bus =
          std::min(option.bus * 0.9, channels_ * 1e9 * constants().tree_ll128[gen_][hosts_]);
    }
    option.factor = 0.5;
    option.latency = constants().base_latency[kTree][protocol] * 1e-6 +
                     2 * ((group_.num_ranks / static_cast<double>(group_.num_hosts) - 1) *
                              latency_of(intra_, kTree, protocol) +
                          std::log2(static_cast<double>(group_.num_hosts)) *
                              latency_of(kOnNet, kTree, protocol));
    return option;
  }

  // NVSwitch reduces: Hopper and later, within a host.
  bool has_nvls() const {
    return (gen_ == kHopper || gen_ == kBlackwell) && group_.num_hosts == 1 &&
           group_.num_ranks > 2 && group_.intra.kind == LinkKind::kNvLink &&
           group_.intra.name != "nvlink4-mesh" && kind_ != Collective::kAllToAll &&
           kind_ != Collective::kBroadcast;
  }

  Option nvls() const {
    Option option;
    const double channels = 16;
    option.bus = effective_intra_bandwidth(group_.intra) * constants().nvls_efficiency[gen_] *
                 (channels - 1) / channels * (all_reduce() ? 2 : 1);
    const double n = group_.num_ranks;
    option.factor = all_reduce() ? n / (2 * (n - 1)) : n / (n - 1);
    option.latency = constants().nvls_latency * 1e-6;
    return option;
  }

 private:
  // The ring's slowest link. A host's network is entered once per channel; together the channels
  // use what the group gets of the host's cards.
  double bus_bandwidth() const {
    double bus = 1e30;
    if (group_.ranks_per_host > 1) {
      bus = effective_intra_bandwidth(group_.intra);
    }
    if (group_.num_hosts > 1) {
      bus = std::min(bus, effective_inter_bandwidth(group_.inter, group_.host_bandwidth));
    }
    return bus;
  }

  static double latency_of(Where where, Algorithm algorithm, Protocol protocol) {
    return constants().latency[where][algorithm][protocol] * 1e-6;
  }

  Collective kind_;
  const GroupLinks& group_;
  Generation gen_;
  int hosts_;
  Where intra_;
  double bus_;
  double channels_;
};

void offer(const Option& option, double bytes, const char* name, CollectiveTime* best) {
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

namespace {

const std::vector<CallSample>* calls_of(Collective kind, const LinkType& link) {
  const char* const names[] = {
      "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast"};
  const auto found = link.calls.find(names[static_cast<int>(kind)]);
  return found == link.calls.end() ? nullptr : &found->second;
}

// Between samples along a line, beyond the last one in proportion to its last stretch.
double call_seconds(const std::vector<CallSample>& samples, double bytes) {
  size_t i = 1;
  while (i + 1 < samples.size() && samples[i].bytes < bytes) {
    ++i;
  }
  const CallSample& from = samples[i - 1];
  const CallSample& to = samples[i];
  const double along = (bytes - from.bytes) / (to.bytes - from.bytes);
  return std::max(std::min(from.seconds, to.seconds),
                  from.seconds + along * (to.seconds - from.seconds));
}

}  // namespace

CollectiveTime collective_time(Collective kind,
                               double bytes,
                               const GroupLinks& group,
                               const std::string& architecture) {
  if (group.num_ranks <= 1 || bytes <= 0) {
    return {0, "none"};
  }
  if (group.intra.kind == LinkKind::kSharedMemory) {
    const double bandwidth =
        group.num_hosts > 1 ? std::min(group.intra.bandwidth,
                                       effective_inter_bandwidth(group.inter, group.host_bandwidth))
                            : group.intra.bandwidth;
    const double n = group.num_ranks;
    const int rounds = kind == Collective::kAllReduce ? 2 : 1;
    const double steps = rounds * (n - 1) / n;
    if (const auto* samples = group.num_hosts == 1 ? calls_of(kind, group.intra) : nullptr) {
      // Of another number of ranks each moves another part of the tensor.
      const double measured = std::max(2, group.intra.measured_ranks);
      const double part = (n - 1) / n / ((measured - 1) / measured);
      return {call_seconds(*samples, part * bytes), "measured"};
    }
    return {kSharedMemoryLatency * (rounds * (group.num_ranks - 1)) + steps * bytes / bandwidth,
            "ring/host"};
  }
  const Model model(kind, group, generation(architecture));
  const char* const rings[] = {"ring/ll", "ring/ll128", "ring/simple"};
  const char* const trees[] = {"tree/ll", "tree/ll128", "tree/simple"};
  CollectiveTime best;
  for (const Protocol protocol : {kLL, kLL128, kSimple}) {
    // LL128 needs NVLink's ordering of 128-byte stores.
    if (protocol == kLL128 && group.intra.kind != LinkKind::kNvLink) {
      continue;
    }
    offer(model.ring(protocol), bytes, rings[protocol], &best);
    if (model.all_reduce()) {
      offer(model.tree(protocol), bytes, trees[protocol], &best);
    }
  }
  if (model.has_nvls()) {
    offer(model.nvls(), bytes, "nvls/simple", &best);
  }
  return best;
}

MessageTime message_time(double bytes, const GroupLinks& pair) {
  const auto send = pair.intra.calls.find("send"), receive = pair.intra.calls.find("receive");
  if (pair.num_hosts > 1 || send == pair.intra.calls.end() || receive == pair.intra.calls.end()) {
    return {0, send_time(bytes, pair), 0};
  }
  return {call_seconds(send->second, bytes),
          pair.intra.wake_seconds,
          call_seconds(receive->second, bytes)};
}

double send_time(double bytes, const GroupLinks& pair) {
  if (pair.num_hosts > 1) {
    return constants().latency[kOnNet][kRing][kSimple] * 1e-6 +
           bytes / effective_inter_bandwidth(pair.inter, pair.host_bandwidth);
  }
  if (pair.intra.kind == LinkKind::kSharedMemory) {
    return kSharedMemoryLatency + bytes / pair.intra.bandwidth;
  }
  const Where where = pair.intra.kind == LinkKind::kNvLink ? kOnNvLink : kOnPci;
  return (constants().base_latency[kRing][kSimple] + constants().latency[where][kRing][kSimple]) *
             1e-6 +
         bytes / effective_intra_bandwidth(pair.intra);
}

}  // namespace trainrt
