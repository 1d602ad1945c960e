#include "planner/error_bands.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

#include "graph/base/error.h"
#include "parallel/csv.h"
#include "planner/embedded_data.h"

namespace trainrt {

namespace {

constexpr size_t kLeastRows = 3;

struct Group {
  std::vector<double> off;  // measured / predicted - 1
  std::set<std::string> files;
};

struct Key {
  std::string kind, machine, hosts;
  auto operator<=>(const Key&) const = default;
};

Key key_of(const Topology& topology, bool sequence_model) {
  return {sequence_model ? "transformer" : "image",
          topology.types.size() > 1 ? "mixed" : topology.types[0].architecture,
          topology.hosts.size() > 1 ? "many" : "one"};
}

double percentile(const std::vector<double>& sorted, double share) {
  return sorted[static_cast<size_t>(share * static_cast<double>(sorted.size() - 1) + 0.5)];
}

std::string line(const Key& key, Group group) {
  std::sort(group.off.begin(), group.off.end());
  std::string files;
  for (const std::string& file : group.files) {
    files += (files.empty() ? "" : " ") + file.substr(0, file.rfind('.'));
  }
  char text[64];
  std::snprintf(text,
                sizeof(text),
                "%zu,%.2f,%.2f",
                group.off.size(),
                percentile(group.off, 0.1),
                percentile(group.off, 0.9));
  return concat(key.kind, ",", key.machine, ",", key.hosts, ",", text, ",", files, "\n");
}

const std::map<Key, ErrorBand>& table() {
  static const std::map<Key, ErrorBand> kTable = [] {
    std::map<Key, ErrorBand> bands;
    for (CsvRow& row : parse_csv(embedded_error_bands_csv(), "error_bands.csv")) {
      bands[{row["kind"], row["machine"], row["hosts"]}] = {
          std::stod(row["low"]),
          std::stod(row["high"]),
          concat(row["rows"], " rows of ", row["from"])};
    }
    return bands;
  }();
  return kTable;
}

}  // namespace

std::string error_bands_csv(const std::vector<FileResult>& results) {
  std::map<Key, Group> groups;
  for (const FileResult& file : results) {
    for (const RowResult& result : file.results) {
      Group& group = groups[key_of(topology_of_row(result.row), result.row.model != "resnet50")];
      group.off.push_back(result.row.seconds / result.predicted_seconds - 1);
      group.files.insert(file.file);
    }
  }
  std::string text = "kind,machine,hosts,rows,low,high,from\n";
  for (const auto& [key, group] : groups) {
    if (group.off.size() >= kLeastRows) {
      text += line(key, group);
    }
  }
  return text;
}

ErrorBand error_band(const Topology& topology, bool sequence_model) {
  const Key key = key_of(topology, sequence_model);
  const std::string other = key.hosts == "one" ? "many" : "one";
  for (const Key& near : {key, Key{key.kind, key.machine, other}}) {
    const auto found = table().find(near);
    if (found != table().end()) {
      return found->second;
    }
  }
  ErrorBand widest;
  for (const auto& [other_key, band] : table()) {
    widest.low = std::min(widest.low, band.low);
    widest.high = std::max(widest.high, band.high);
  }
  widest.from = "no published rows of such a model and machine: the widest band of all";
  return widest;
}

}  // namespace trainrt
