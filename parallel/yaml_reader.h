// Reads the nodes of a YAML file: what is wrong is told with file and line. Private to the readers
// of cluster files.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "graph/base/error.h"
#include "parallel/cluster_file.h"
#include "parallel/yaml_text.h"

namespace trainrt {

struct YamlReader {
  static constexpr int kMostDevices = 1 << 20;

  std::string where;

  std::string at(const YAML::Node& node) const { return yaml_location(where, node) + ": "; }
  void check_map(const YAML::Node& node,
                 const std::string& what,
                 const std::vector<std::string>& keys) const {
    TRAINRT_REQUIRE(node.IsMap(), kInvalidArgument, at(node), what, " must be a map {key: value}");
    for (const auto& entry : node) {
      const std::string key = entry.first.as<std::string>();
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
        TRAINRT_FAIL(kInvalidArgument,
                     at(entry.first),
                     "unknown key '",
                     key,
                     "' in ",
                     what,
                     did_you_mean(key, keys),
                     "; known: ",
                     joined(keys));
      }
    }
  }
  static std::string joined(const std::vector<std::string>& words) {
    std::string text;
    for (const std::string& word : words) {
      text += (text.empty() ? "" : ", ") + word;
    }
    return text;
  }
  double number(const YAML::Node& node, const std::string& key) const {
    double value = 0;
    try {
      value = node.as<double>();
    } catch (const YAML::Exception&) {
      TRAINRT_FAIL(kInvalidArgument, at(node), key, " must be a number, found '", text(node), "'");
    }
    TRAINRT_REQUIRE(std::isfinite(value) && value > 0,
                    kInvalidArgument,
                    at(node),
                    key,
                    " must be above zero, found '",
                    text(node),
                    "'");
    return value;
  }
  int count(const YAML::Node& node, const std::string& key) const {
    const double value = number(node, key);
    TRAINRT_REQUIRE(value == std::floor(value) && value <= kMostDevices,
                    kInvalidArgument,
                    at(node),
                    key,
                    " must be a whole number from 1 to ",
                    kMostDevices,
                    ", found '",
                    text(node),
                    "'");
    return static_cast<int>(value);
  }
  int64_t bytes(const YAML::Node& node, const std::string& key) const {
    return parse_bytes(text(node), at(node) + key);
  }
  static std::string text(const YAML::Node& node) {
    return node.IsScalar() ? node.Scalar() : "a list or map";
  }
};

}  // namespace trainrt
