// YAML as users write it: cluster files and configurations.
#pragma once

#include <yaml-cpp/yaml.h>

#include <string>

namespace trainrt {

// "where:line" of a node, or `where` alone for one that was not read from a text.
std::string yaml_location(const std::string& where, const YAML::Node& node);

// A file holds fewer nodes, counted with what its aliases stand for, and nests them less deep.
inline constexpr int kMostYamlNodes = 1'000'000;
inline constexpr int kMostYamlDepth = 64;

// Throws kInvalidArgument, naming `where`, for what is no YAML, for several documents, for keys
// that are lists or maps, for a key that a map has twice (yaml-cpp would use one without a word)
// and for aliases that lead back to themselves or beyond the limits above: whoever walks what is
// returned comes to an end.
YAML::Node parse_yaml(const std::string& text, const std::string& where);

}  // namespace trainrt
