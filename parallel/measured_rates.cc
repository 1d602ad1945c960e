#include "parallel/measured_rates.h"

namespace trainrt {

namespace {

std::vector<double> numbers(const YamlReader& reader,
                            const YAML::Node& row,
                            size_t count,
                            const std::string& what) {
  TRAINRT_REQUIRE(row.IsSequence() && row.size() == count,
                  kInvalidArgument,
                  reader.at(row),
                  "an entry of ",
                  what,
                  " has ",
                  count,
                  " numbers");
  std::vector<double> values;
  for (const YAML::Node& value : row) {
    values.push_back(YamlReader::text(value) == "0" ? 0 : reader.number(value, what));
  }
  TRAINRT_REQUIRE(
      values.back() > 0, kInvalidArgument, reader.at(row), "the last number is above zero");
  return values;
}

}  // namespace

void read_samples(const YamlReader& reader, const YAML::Node& node, DeviceType* type) {
  const YAML::Node kernels = node["kernels"];
  TRAINRT_REQUIRE(!kernels || kernels.IsMap(),
                  kInvalidArgument,
                  reader.at(kernels),
                  "kernels must be a map {name: [[batch, m, n, k, bytes, seconds], ...]}");
  for (const YAML::Node& row : node["streams"]) {
    const std::vector<double> values = numbers(reader, row, 2, "streams");
    TRAINRT_REQUIRE(values[0] > (type->streams.empty() ? 0 : type->streams.back().working_set),
                    kInvalidArgument,
                    reader.at(row),
                    "streams are listed by ascending working set");
    type->streams.push_back({values[0], values[1]});
  }
  for (const auto& entry : kernels) {
    std::vector<KernelSample>& samples = type->kernels[YamlReader::text(entry.first)];
    for (const YAML::Node& row : entry.second) {
      const std::vector<double> v = numbers(reader, row, 6, "kernels");
      samples.push_back({v[0], v[1], v[2], v[3], v[4], v[5]});
    }
    TRAINRT_REQUIRE(!samples.empty(), kInvalidArgument, reader.at(entry.second), "no samples");
  }
}

void read_calls(const YamlReader& reader, const YAML::Node& node, LinkType* link) {
  if (node["wake_seconds"]) {
    link->wake_seconds = reader.number(node["wake_seconds"], "wake_seconds");
  }
  if (node["measured_ranks"]) {
    link->measured_ranks = reader.count(node["measured_ranks"], "measured_ranks");
  }
  if (!node["calls"]) {
    return;
  }
  reader.check_map(
      node["calls"],
      "calls",
      {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "receive"});
  for (const auto& entry : node["calls"]) {
    std::vector<CallSample>& samples = link->calls[entry.first.as<std::string>()];
    for (const YAML::Node& row : entry.second) {
      const std::vector<double> values = numbers(reader, row, 2, "calls");
      TRAINRT_REQUIRE(samples.empty() || values[0] > samples.back().bytes,
                      kInvalidArgument,
                      reader.at(row),
                      "calls are listed by ascending bytes");
      samples.push_back({values[0], values[1]});
    }
    TRAINRT_REQUIRE(samples.size() > 1,
                    kInvalidArgument,
                    reader.at(entry.second),
                    "a call needs times of two sizes");
  }
}

}  // namespace trainrt
