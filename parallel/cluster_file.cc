// Every map is read key by key against the list of keys it may have, so that a misspelt key is an
// error with near names instead of a default nobody asked for.
#include "parallel/cluster_file.h"

#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "graph/base/error.h"
#include "parallel/device_catalogue.h"
#include "parallel/measured_rates.h"
#include "parallel/nvidia_smi.h"
#include "parallel/yaml_reader.h"

namespace trainrt {

namespace {

// Rates of one x86 core: a register-only multiply-add loop on a 3.7 GHz AVX2 machine reaches 117
// GFLOP/s in fp32, and one thread streams some 20 GB/s. `trainrt profile` replaces them.
constexpr double kCoreFlops = 117e9;
constexpr double kHostMemoryBandwidth = 40e9;

DeviceType cpu_type() {
  DeviceType type;
  type.name = "cpu";
  type.architecture = "cpu";
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  type.num_sms = cores;
  type.memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  type.memory_bandwidth = kHostMemoryBandwidth;
  type.flops = {{"fp64", kCoreFlops / 2 * cores},
                {"fp32", kCoreFlops * cores},
                {"bf16", 2 * kCoreFlops * cores},
                {"fp16", kCoreFlops * cores}};
  return type;
}

// CPU devices of one host are its cores, memory and bandwidth in equal parts.
DeviceType cpu_share(int num_devices) {
  DeviceType type = cpu_type();
  for (auto& [precision, rate] : type.flops) {
    rate /= num_devices;
  }
  type.memory_bandwidth /= num_devices;
  type.num_sms = std::max(1, type.num_sms / num_devices);
  type.memory_bytes /= num_devices;
  return type;
}

void apply_overrides(const YamlReader& reader, const YAML::Node& node, DeviceType* type) {
  if (node["memory"]) {
    type->memory_bytes = reader.bytes(node["memory"], "memory");
    TRAINRT_REQUIRE(type->memory_bytes > 0,
                    kInvalidArgument,
                    reader.at(node["memory"]),
                    "memory must be above zero");
  }
  if (node["speed"]) {
    type->speed *= reader.number(node["speed"], "speed");
  }
}

using TypeTable = std::map<std::string, DeviceType>;

// An entry of `devices:`: an override of a catalogue device when the name is known there or under
// `base`, else a new one, which must then be complete.
DeviceType read_device_type(const YamlReader& reader,
                            const std::string& name,
                            const YAML::Node& node) {
  reader.check_map(node,
                   "device type '" + name + "'",
                   {"base",
                    "memory",
                    "reserved",
                    "speed",
                    "flops",
                    "memory_bandwidth",
                    "sms",
                    "architecture",
                    "efficiency",
                    "streams",
                    "kernels"});
  DeviceType type;
  const std::string base = node["base"] ? YamlReader::text(node["base"]) : name;
  const std::optional<CatalogueEntry> known = match_device(base);
  if (known.has_value()) {
    type = known->device;
  } else if (base == "cpu") {
    type = cpu_type();
  } else {
    TRAINRT_REQUIRE(!node["base"], kInvalidArgument, reader.at(node), "unknown base '", base, "'");
    for (const char* key : {"memory", "flops", "memory_bandwidth"}) {
      TRAINRT_REQUIRE(node[key],
                      kInvalidArgument,
                      reader.at(node),
                      "device type '",
                      name,
                      "' is not in the catalogue, so it needs ",
                      key,
                      " (or base: a known device)");
    }
    type.architecture = "generic";
    type.num_sms = 64;
  }
  type.name = name;
  apply_overrides(reader, node, &type);
  if (node["reserved"]) {
    type.reserved_bytes = reader.bytes(node["reserved"], "reserved");
  }
  if (node["memory_bandwidth"]) {
    type.memory_bandwidth = reader.number(node["memory_bandwidth"], "memory_bandwidth");
  }
  if (node["sms"]) {
    type.num_sms = reader.count(node["sms"], "sms");
  }
  if (node["architecture"]) {
    type.architecture = YamlReader::text(node["architecture"]);
  }
  if (node["flops"]) {
    reader.check_map(node["flops"], "flops", {"fp64", "fp32", "tf32", "fp16", "bf16", "fp8"});
    for (const auto& entry : node["flops"]) {
      const std::string precision = entry.first.as<std::string>();
      type.flops[precision] = reader.number(entry.second, precision);
    }
  }
  if (node["efficiency"]) {
    reader.check_map(node["efficiency"], "efficiency", efficiency_names());
    for (const auto& entry : node["efficiency"]) {
      const std::string figure = entry.first.as<std::string>();
      type.efficiency[figure] = reader.number(entry.second, figure);
    }
  }
  read_samples(reader, node, &type);
  return type;
}

struct HostEntry {
  std::vector<int> device_types;
  std::vector<int64_t> reserved;
  LinkType intra;
  LinkType inter;
  int num_nics = 1;
};

void read_inter(const YamlReader& reader, const YAML::Node& node, HostEntry* entry) {
  if (node.IsScalar()) {
    entry->inter = find_link(node.Scalar());
    return;
  }
  reader.check_map(node, "inter", {"type", "nics", "bandwidth"});
  if (node["type"]) {
    entry->inter = find_link(YamlReader::text(node["type"]));
  }
  if (node["nics"]) {
    entry->num_nics = reader.count(node["nics"], "nics");
  }
  if (node["bandwidth"]) {  // bytes/s of one card, for what the table lacks
    entry->inter.bandwidth = reader.number(node["bandwidth"], "bandwidth");
    entry->inter.kind = LinkKind::kNetwork;
  }
}

void read_links(const YamlReader& reader, const YAML::Node& node, HostEntry* entry) {
  if (const YAML::Node intra = node["intra"]; intra && intra.IsMap()) {
    reader.check_map(
        intra, "intra", {"type", "bandwidth", "measured_ranks", "wake_seconds", "calls"});
    if (intra["type"]) {
      entry->intra = find_link(YamlReader::text(intra["type"]));
    }
    if (intra["bandwidth"]) {  // bytes/s of one device in one direction
      entry->intra.bandwidth = reader.number(intra["bandwidth"], "bandwidth");
    }
    read_calls(reader, intra, &entry->intra);
  } else if (intra) {
    entry->intra = find_link(YamlReader::text(intra));
  }
  if (node["inter"]) {
    read_inter(reader, node["inter"], entry);
  }
}

std::string file_text(const std::string& path) {
  std::error_code error;
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  TRAINRT_REQUIRE(file.good() && std::filesystem::is_regular_file(path, error),
                  kIo,
                  "cannot read file '",
                  path,
                  "'");
  return text.str();
}

HostEntry smi_entry(const SmiHost& host, Topology* topology) {
  HostEntry entry;
  entry.intra = host.intra;
  entry.inter = host.inter;
  entry.num_nics = host.num_nics;
  for (const SmiDevice& device : host.devices) {
    entry.device_types.push_back(topology->add_type(device.type));
    entry.reserved.push_back(device.used_bytes);
  }
  return entry;
}

// `nvidia_smi: {query: FILE, topo: FILE}`: paths relative to the cluster file.
HostEntry read_smi_entry(const YamlReader& reader, const YAML::Node& node, Topology* topology) {
  reader.check_map(node, "nvidia_smi", {"query", "topo"});
  TRAINRT_REQUIRE(node["query"],
                  kInvalidArgument,
                  reader.at(node),
                  "nvidia_smi needs query: FILE, the output of `nvidia-smi -q`");
  const std::filesystem::path folder = std::filesystem::path(reader.where).parent_path();
  const auto file = [&](const char* key) {
    SmiFile named;
    if (node[key]) {
      named.name = YamlReader::text(node[key]);
      named.text = file_text((folder / named.name).string());
    }
    return named;
  };
  return smi_entry(read_smi_host(file("query"), file("topo")), topology);
}

// The first device decides what the host entry leaves unsaid.
HostEntry read_host(const YamlReader& reader,
                    const YAML::Node& node,
                    const TypeTable& own,
                    Topology* topology) {
  reader.check_map(node, "a host", {"count", "devices", "nvidia_smi", "intra", "inter"});
  if (node["nvidia_smi"] && !node["devices"]) {
    HostEntry entry = read_smi_entry(reader, node["nvidia_smi"], topology);
    read_links(reader, node, &entry);
    return entry;
  }
  TRAINRT_REQUIRE(node["devices"] && node["devices"].IsSequence() && node["devices"].size() > 0,
                  kInvalidArgument,
                  reader.at(node),
                  "a host needs devices: [{count: N, type: NAME}], or nvidia_smi: {query: FILE}");
  HostEntry entry;
  entry.intra = find_link("shared-memory");
  entry.inter = find_link("ethernet-10g");
  bool first = true;
  int num_cpus = 0;
  for (const YAML::Node& device : node["devices"]) {
    reader.check_map(device, "a device", {"count", "type", "memory", "reserved", "speed"});
    TRAINRT_REQUIRE(device["type"], kInvalidArgument, reader.at(device), "a device needs type:");
    if (YamlReader::text(device["type"]) == "cpu") {
      num_cpus += device["count"] ? reader.count(device["count"], "count") : 1;
    }
  }
  for (const YAML::Node& device : node["devices"]) {
    const std::string name = YamlReader::text(device["type"]);
    DeviceType type;
    if (own.count(name) != 0) {
      type = own.at(name);
    } else if (name == "cpu") {
      type = cpu_share(num_cpus);
    } else {
      const CatalogueEntry known = find_device(name);
      type = known.device;
    }
    if (const auto known = match_device(type.name); first && known.has_value()) {
      entry.intra = known->intra;
      entry.inter = known->inter;
      entry.num_nics = known->num_nics;
    } else if (first && !type.is_cpu()) {
      entry.intra = find_link("pcie4");
    }
    first = false;
    apply_overrides(reader, device, &type);
    const int count = device["count"] ? reader.count(device["count"], "count") : 1;
    const int64_t reserved = device["reserved"] ? reader.bytes(device["reserved"], "reserved") : 0;
    const int index = topology->add_type(type);
    entry.device_types.insert(entry.device_types.end(), static_cast<size_t>(count), index);
    entry.reserved.insert(entry.reserved.end(), static_cast<size_t>(count), reserved);
  }
  read_links(reader, node, &entry);
  return entry;
}

void append_host(const HostEntry& entry, Topology* topology) {
  const size_t begin = topology->devices.size();
  topology->add_host(entry.device_types, entry.intra, entry.inter, entry.num_nics);
  for (size_t i = 0; i < entry.reserved.size(); ++i) {
    topology->devices[begin + i].extra_reserved_bytes = entry.reserved[i];
  }
}

struct Preset {
  const char* name;
  const char* device;
};
constexpr Preset kMachines[] = {
    {"dgx-1", "V100-SXM2-16GB"},
    {"dgx-1-32gb", "V100-SXM2-32GB"},
    {"dgx-a100", "A100-SXM4-80GB"},
    {"dgx-a100-40gb", "A100-SXM4-40GB"},
    {"dgx-h100", "H100-SXM5-80GB"},
    {"dgx-h200", "H200-SXM-141GB"},
    {"dgx-b200", "B200-SXM"},
    {"g4dn.12xlarge", "T4"},
};

}  // namespace

int64_t parse_bytes(const std::string& text, const std::string& where) {
  double value = 0;
  std::string unit;
  std::istringstream in(text);
  in >> value;
  const bool read = !in.fail();
  in.clear();
  in >> unit;
  static const std::map<std::string, double> kUnits = {{"", 1},
                                                       {"B", 1},
                                                       {"KiB", 1024.0},
                                                       {"MiB", 1048576.0},
                                                       {"GiB", 1073741824.0},
                                                       {"TiB", 1099511627776.0}};
  const auto scale = kUnits.find(unit);
  TRAINRT_REQUIRE(read && scale != kUnits.end(),
                  kInvalidArgument,
                  where,
                  ": '",
                  text,
                  "' is no size; write a number of bytes, or one with KiB, MiB, GiB or TiB");
  TRAINRT_REQUIRE(value >= 0 && value * scale->second < 9e18,
                  kInvalidArgument,
                  where,
                  ": a size is not negative and below 8 EiB, found '",
                  text,
                  "'");
  return static_cast<int64_t>(value * scale->second);
}

Topology parse_cluster(const std::string& text, const std::string& where) {
  const YamlReader reader{where};
  const YAML::Node root = parse_yaml(text, where);
  TRAINRT_REQUIRE(root.IsMap(), kInvalidArgument, where, ": wanted a map with `hosts:`");
  reader.check_map(root, "the cluster file", {"hosts", "devices"});
  TypeTable own;
  if (root["devices"]) {
    TRAINRT_REQUIRE(root["devices"].IsMap(),
                    kInvalidArgument,
                    reader.at(root["devices"]),
                    "devices must be a map {name: {memory: ...}}");
    for (const auto& entry : root["devices"]) {
      const std::string name = entry.first.as<std::string>();
      own[name] = read_device_type(reader, name, entry.second);
    }
  }
  TRAINRT_REQUIRE(root["hosts"] && root["hosts"].IsSequence() && root["hosts"].size() > 0,
                  kInvalidArgument,
                  where,
                  ": no devices: `hosts:` must list at least one host");
  Topology topology;
  for (const YAML::Node& node : root["hosts"]) {
    const HostEntry entry = read_host(reader, node, own, &topology);
    const int count = node["count"] ? reader.count(node["count"], "count") : 1;
    TRAINRT_REQUIRE(static_cast<double>(count) * static_cast<double>(entry.device_types.size()) +
                            topology.num_devices() <=
                        YamlReader::kMostDevices,
                    kInvalidArgument,
                    reader.at(node),
                    "more than ",
                    YamlReader::kMostDevices,
                    " devices");
    for (int i = 0; i < count; ++i) {
      append_host(entry, &topology);
    }
  }
  return topology;
}

Topology make_preset(const std::string& preset) {
  const size_t colon = preset.rfind(':');
  const std::string name = preset.substr(0, colon);
  int count = 1;
  if (colon != std::string::npos) {
    const std::string digits = preset.substr(colon + 1);
    TRAINRT_REQUIRE(!digits.empty() && digits.size() < 7 &&
                        std::all_of(digits.begin(), digits.end(), ::isdigit) &&
                        std::stoi(digits) > 0,
                    kInvalidArgument,
                    "preset '",
                    preset,
                    "': after the colon stands the number of hosts, found '",
                    digits,
                    "'");
    count = std::stoi(digits);
  }
  Topology topology;
  if (name == "cpu") {
    const int type = topology.add_type(cpu_share(count));
    topology.add_host(std::vector<int>(static_cast<size_t>(count), type),
                      find_link("shared-memory"),
                      find_link("ethernet-10g"),
                      1);
    return topology;
  }
  std::string device = name;
  for (const Preset& machine : kMachines) {
    if (name == machine.name) {
      device = machine.device;
    }
  }
  const std::optional<CatalogueEntry> found = match_device(device);
  TRAINRT_REQUIRE(found.has_value(),
                  kInvalidArgument,
                  "'",
                  name,
                  "' is neither a cluster file nor a preset",
                  did_you_mean(name, preset_names()));
  const int type = topology.add_type(found->device);
  for (int i = 0; i < count; ++i) {
    topology.add_host(std::vector<int>(static_cast<size_t>(found->devices_per_host), type),
                      found->intra,
                      found->inter,
                      found->num_nics);
  }
  return topology;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names = {"cpu"};
  for (const Preset& machine : kMachines) {
    names.emplace_back(machine.name);
  }
  for (const CatalogueEntry& entry : device_catalogue()) {
    std::string lower;
    for (const char c : entry.device.name.substr(0, entry.device.name.find(" ("))) {
      lower += c == ' ' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
    names.push_back(lower);
  }
  return names;
}

Topology load_cluster(const std::string& file_or_preset) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(file_or_preset, error)) {
    return make_preset(file_or_preset);
  }
  const std::string text = file_text(file_or_preset);
  TRAINRT_REQUIRE(!is_smi_topology(text),
                  kInvalidArgument,
                  "'",
                  file_or_preset,
                  "' is the output of `nvidia-smi topo -m`, which does not say what the GPUs are; "
                  "name it in a cluster file: hosts: [{nvidia_smi: {query: FILE, topo: ",
                  file_or_preset,
                  "}}], where query is the output of `nvidia-smi -q`");
  if (is_smi_query(text)) {
    Topology topology;
    append_host(smi_entry(read_smi_host({file_or_preset, text}, {}), &topology), &topology);
    return topology;
  }
  return parse_cluster(text, file_or_preset);
}

}  // namespace trainrt
