#include "runtime/commands/plan_flags.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <vector>

#include "graph/base/error.h"
#include "parallel/cluster_file.h"
#include "parallel/device_catalogue.h"

namespace trainrt {

namespace {

// Only flags are looked at: a configuration file may keep what `run` reads.
bool is_flag(const Options& options, const char* name) {
  return options.flags.count(name) != 0;
}

Topology cpus_of_this_machine(const Options& options) {
  const std::string devices = options.devices.empty() ? "cpu" : options.devices;
  TRAINRT_REQUIRE(devices == "cpu" || devices.rfind("cpu:", 0) == 0,
                  kInvalidArgument,
                  "--devices ",
                  devices,
                  " names devices of this machine; name those to plan for with --cluster");
  Topology topology = make_preset(devices);
  if (options.nproc == 1) {
    return topology;
  }
  TRAINRT_REQUIRE(topology.num_devices() == 1,
                  kInvalidArgument,
                  "--devices ",
                  devices,
                  " are ",
                  topology.num_devices(),
                  " ranks as threads, but --nproc ",
                  options.nproc,
                  " has each process be a rank; leave one of them out");
  return make_preset(concat("cpu:", options.nproc));
}

double price_of(const std::string& text, const std::string& whole) {
  double value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  TRAINRT_REQUIRE(status == std::errc() && end == text.data() + text.size() && value > 0,
                  kInvalidArgument,
                  "--price is '",
                  whole,
                  "'; wanted a number above zero, or TYPE=NUMBER,...");
  return value;
}

std::string list_of(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "" : ", ") + name;
  }
  return text;
}

}  // namespace

Topology planned_topology(const Options& options) {
  TRAINRT_REQUIRE(!is_flag(options, "devices") || !is_flag(options, "cluster"),
                  kInvalidArgument,
                  "--devices ",
                  options.devices,
                  " and --cluster ",
                  options.cluster,
                  " both name what to plan for; leave one of them out");
  if (options.cluster.empty()) {
    return cpus_of_this_machine(options);
  }
  Topology topology = load_cluster(options.cluster);
  TRAINRT_REQUIRE(options.nproc == 1 || options.nproc == topology.num_devices(),
                  kInvalidArgument,
                  "--cluster ",
                  options.cluster,
                  " has ",
                  topology.num_devices(),
                  " devices, but --nproc ",
                  options.nproc,
                  " starts as many ranks; leave --nproc out");
  const bool has_cpu = std::any_of(topology.types.begin(),
                                   topology.types.end(),
                                   [](const DeviceType& type) { return type.is_cpu(); });
  TRAINRT_REQUIRE(has_cpu || !is_flag(options, "threads"),
                  kInvalidArgument,
                  "--threads has no effect with --cluster ",
                  options.cluster,
                  ", which has no CPU among its devices");
  return topology;
}

// "2.5" for every device, or by type, named as in a cluster file: "h100-sxm=4,A100-SXM4-80GB=2".
std::map<std::string, double> planned_prices(const Options& options, const Topology& topology) {
  const bool wanted = options.objective == "cost";
  TRAINRT_REQUIRE(wanted || !is_flag(options, "price"),
                  kInvalidArgument,
                  "--price has no effect with --objective ",
                  options.objective,
                  "; it belongs to --objective cost");
  TRAINRT_REQUIRE(!wanted || !options.price.empty(),
                  kInvalidArgument,
                  "--objective cost wants --price X, of a device hour, or --price TYPE=X,...");
  std::map<std::string, double> prices;
  if (!wanted) {
    return prices;
  }
  std::set<std::string> types;  // of devices that are there
  for (int d = 0; d < topology.num_devices(); ++d) {
    types.insert(topology.type_of(d).name);
  }
  if (options.price.find('=') == std::string::npos) {
    for (const std::string& type : types) {
      prices[type] = price_of(options.price, options.price);
    }
    return prices;
  }
  const std::vector<std::string> names(types.begin(), types.end());
  std::string rest = options.price + ",";
  for (size_t comma = rest.find(','); comma != std::string::npos; comma = rest.find(',')) {
    const std::string item = rest.substr(0, comma);
    rest.erase(0, comma + 1);
    const size_t equals = item.find('=');
    TRAINRT_REQUIRE(
        equals != std::string::npos, kInvalidArgument, "--price: '", item, "' is not TYPE=NUMBER");
    const std::string written = item.substr(0, equals);
    const std::optional<CatalogueEntry> known = match_device(written);
    const std::string type =
        types.count(written) == 0 && known.has_value() ? known->device.name : written;
    TRAINRT_REQUIRE(types.count(type) != 0,
                    kInvalidArgument,
                    "--price names '",
                    written,
                    "', which the cluster does not have; its devices are ",
                    list_of(names),
                    did_you_mean(written, names));
    TRAINRT_REQUIRE(prices.emplace(type, price_of(item.substr(equals + 1), options.price)).second,
                    kInvalidArgument,
                    "--price names '",
                    type,
                    "' twice");
  }
  for (const std::string& type : types) {
    TRAINRT_REQUIRE(prices.count(type) != 0,
                    kInvalidArgument,
                    "--price says nothing of '",
                    type,
                    "', which the cluster has; add ",
                    type,
                    "=X");
  }
  return prices;
}

}  // namespace trainrt
