// YAML as users write it: cluster files and configurations.
#pragma once

#include <yaml-cpp/yaml.h>

#include <string>

namespace trainrt {

// "where:line" of a node, or `where` alone for one that was not read from a text.
std::string yaml_location(const std::string& where, const YAML::Node& node);

// Throws kInvalidArgument, naming `where`, for what is no YAML and for a key that a map has twice,
// of which yaml-cpp would use one without a word.
YAML::Node parse_yaml(const std::string& text, const std::string& where);

}  // namespace trainrt
