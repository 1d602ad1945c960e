// A group maps its own keys to options; a key it does not map may also be a flag of its own name,
// so that `optim: {lr: 0.1, beta1: 0.95}` works without a second list of flags.
#include "runtime/config_file.h"

#include <algorithm>
#include <map>

#include "graph/base/error.h"
#include "parallel/yaml_text.h"

namespace trainrt {

namespace {

const std::map<std::string, std::map<std::string, std::string>> kGroups = {
    {"parallel",
     {{"strategy", ""}, {"data-workers", "dp"}, {"model-shards", "tp"}, {"pipeline-stages", "pp"}}},
    {"optim", {{"name", "optimizer"}}},
    {"precision", {{"enabled", ""}, {"dtype", "precision"}, {"growth-threshold", "growth-factor"}}},
    {"data", {{"spec", "data"}, {"path", "data"}}},
};

std::string dashed(std::string key) {
  std::replace(key.begin(), key.end(), '_', '-');
  return key;
}

std::string scalar_of(const YAML::Node& value, const std::string& name, const std::string& wanted) {
  TRAINRT_REQUIRE(value.IsScalar(),
                  kInvalidArgument,
                  name,
                  " is ",
                  value.IsMap()        ? "a map"
                  : value.IsSequence() ? "a list"
                                       : "empty",
                  "; wanted ",
                  wanted);
  return value.Scalar();
}

void set_option(const OptionDef& def,
                const YAML::Node& value,
                const std::string& where,
                Options& options) {
  const std::string name = concat(where, ": '", def.name, "'");
  if (def.repeatable) {
    def.clear(options);
  }
  if (value.IsScalar()) {
    def.set(options, value.Scalar(), name);
  } else if (value.IsSequence() && (def.repeatable || def.name == "shares")) {
    std::string joined;
    for (const YAML::Node& item : value) {
      TRAINRT_REQUIRE(item.IsScalar(), kInvalidArgument, name, " is a nested list");
      if (def.repeatable) {
        def.set(options, item.Scalar(), name);
      }
      joined += (joined.empty() ? "" : ",") + item.Scalar();
    }
    if (!def.repeatable) {
      def.set(options, joined, name);
    }
  } else if (value.IsMap() && def.repeatable && def.value.find('=') != std::string::npos) {
    for (const auto& item : value) {
      def.set(options,
              scalar_of(item.first, name, "NAME: VALUE") + "=" +
                  scalar_of(item.second, name, "NAME: VALUE"),
              name);
    }
  } else if (!value.IsNull()) {
    TRAINRT_FAIL(kInvalidArgument,
                 name,
                 " is a ",
                 value.IsMap() ? "map" : "list",
                 "; wanted ",
                 def.value.empty() ? "true or false" : "one value");
  }
  options.given.insert(def.name);
}

// precision.enabled, in YAML's own words for true and false.
bool is_enabled(const YAML::Node& value, const std::string& where) {
  const std::string name = where + ": 'enabled'";
  bool enabled = false;
  TRAINRT_REQUIRE(YAML::convert<bool>::decode(value, enabled),
                  kInvalidArgument,
                  name,
                  " is '",
                  scalar_of(value, name, "true or false"),
                  "'; wanted true or false");
  return enabled;
}

// parallel.strategy pins the degrees of the other strategies to 1.
void set_strategy(const std::string& strategy, const std::string& where, Options& options) {
  static const std::map<std::string, std::vector<std::string>> kOthers = {
      {"hybrid", {}}, {"data", {"tp", "pp"}}, {"tensor", {"dp", "pp"}}, {"pipeline", {"dp", "tp"}}};
  const auto at = kOthers.find(strategy);
  TRAINRT_REQUIRE(at != kOthers.end(),
                  kInvalidArgument,
                  where,
                  ": 'strategy' is '",
                  strategy,
                  "'; wanted hybrid, data, tensor or pipeline",
                  did_you_mean(strategy, {"hybrid", "data", "tensor", "pipeline"}));
  for (const std::string& other : at->second) {
    std::optional<int64_t>& degree = other == "dp"   ? options.dp
                                     : other == "tp" ? options.tp
                                                     : options.pp;
    TRAINRT_REQUIRE(!degree || *degree == 1,
                    kInvalidArgument,
                    where,
                    ": strategy '",
                    strategy,
                    "' contradicts ",
                    other,
                    " = ",
                    degree.value_or(1));
    degree = 1;
    options.given.insert(other);
  }
}

// Sizes of example models and what `validate` takes are flags of commands without configuration.
bool is_configurable(const OptionDef& def) {
  return (def.groups & ~unsigned{kModelOptions | kValidateOptions}) != 0;
}

std::vector<std::string> known_keys(const std::string& group) {
  std::vector<std::string> keys;
  for (const OptionDef& def : option_table()) {
    if (is_configurable(def)) {
      keys.push_back(def.name);
    }
  }
  if (group.empty()) {
    for (const auto& [name, unused] : kGroups) {
      keys.push_back(name);
    }
  } else {
    for (const auto& [name, unused] : kGroups.at(group)) {
      keys.push_back(name);
    }
  }
  return keys;
}

// Where each option was set in one configuration: a second place would overrule it without a word.
using Places = std::map<std::string, std::string>;

void set_key(const std::string& group,
             const std::string& raw_key,
             const YAML::Node& value,
             const std::string& where,
             Places& places,
             Options& options) {
  std::string key = dashed(raw_key);
  if (!group.empty()) {
    const auto& names = kGroups.at(group);
    if (group == "precision" && key == "enabled") {
      // Off: full precision; on: whatever dtype says.
      if (!is_enabled(value, where)) {
        find_option("precision")->set(options, "fp32", where);
        options.given.insert("precision");
      }
      return;
    }
    if (group == "parallel" && key == "strategy") {
      return;  // applied after the degrees, see set_group
    }
    const auto at = names.find(key);
    key = at == names.end() ? key : at->second;
  }
  const OptionDef* def = find_option(key);
  TRAINRT_REQUIRE(def != nullptr || !group.empty() || kGroups.count(key) == 0,
                  kInvalidArgument,
                  where,
                  ": '",
                  raw_key,
                  "' is a group; wanted its keys, as in ",
                  raw_key,
                  ": {",
                  kGroups.count(key) == 0 ? "" : kGroups.at(key).begin()->first,
                  ": ...}");
  TRAINRT_REQUIRE(def != nullptr && is_configurable(*def),
                  kInvalidArgument,
                  where,
                  ": unknown key '",
                  group.empty() ? "" : group + ".",
                  raw_key,
                  "'",
                  did_you_mean(key, known_keys(group)));
  const auto [first, is_new] = places.emplace(def->name, where);
  TRAINRT_REQUIRE(is_new,
                  kInvalidArgument,
                  where,
                  ": '",
                  def->name,
                  "' is given twice, first at ",
                  first->second,
                  "; keep one of them");
  set_option(*def, value, where, options);
}

void set_group(const std::string& group,
               const YAML::Node& map,
               const std::string& where,
               Places& places,
               Options& options) {
  for (const auto& item : map) {
    const std::string at = yaml_location(where, item.first);
    set_key(group, item.first.Scalar(), item.second, at, places, options);
  }
  if (group == "parallel" && map["strategy"]) {
    const std::string at = yaml_location(where, map["strategy"]);
    set_strategy(scalar_of(map["strategy"], at + ": 'strategy'", "one value"), at, options);
  }
  // `enabled: false` wins over a dtype beside it, in either order.
  if (group == "precision" && map["enabled"] && !is_enabled(map["enabled"], where)) {
    find_option("precision")->set(options, "fp32", where);
  }
}

}  // namespace

void apply_config(const std::string& text, const std::string& where, Options& options) {
  const YAML::Node root = parse_yaml(text, where);
  if (root.IsNull()) {
    return;
  }
  TRAINRT_REQUIRE(root.IsMap(), kInvalidArgument, "'", where, "' holds no 'key: value' lines");
  Places places;
  for (const auto& item : root) {
    const std::string key = dashed(item.first.Scalar());
    const std::string at = yaml_location(where, item.first);
    if (item.second.IsMap() && kGroups.count(key) != 0) {
      set_group(key, item.second, where, places, options);
    } else {
      set_key("", item.first.Scalar(), item.second, at, places, options);
    }
  }
}

void apply_setting(const std::string& key,
                   const std::string& value,
                   const std::string& where,
                   Options& options) {
  const YAML::Node node = parse_yaml(value, where);
  const size_t dot = key.find('.');
  if (dot == std::string::npos) {
    YAML::Node root;
    root[key] = node;
    apply_config(YAML::Dump(root), where, options);
    return;
  }
  const std::string group = dashed(key.substr(0, dot));
  std::vector<std::string> names;
  for (const auto& [name, unused] : kGroups) {
    names.push_back(name);
  }
  TRAINRT_REQUIRE(kGroups.count(group) != 0,
                  kInvalidArgument,
                  where,
                  ": unknown group '",
                  group,
                  "'",
                  did_you_mean(group, names));
  YAML::Node map;
  map[key.substr(dot + 1)] = node;
  Places places;
  set_group(group, map, where, places, options);
}

}  // namespace trainrt
