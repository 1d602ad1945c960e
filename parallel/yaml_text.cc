#include "parallel/yaml_text.h"

#include <map>

#include "graph/base/error.h"

namespace trainrt {

std::string yaml_location(const std::string& where, const YAML::Node& node) {
  return node.Mark().is_null() ? where : concat(where, ":", node.Mark().line + 1);
}

namespace {

void refuse_repeated_keys(const YAML::Node& node, const std::string& where) {
  if (node.IsSequence()) {
    for (const YAML::Node& item : node) {
      refuse_repeated_keys(item, where);
    }
  }
  if (!node.IsMap()) {
    return;
  }
  std::map<std::string, YAML::Node> keys;
  for (const auto& item : node) {
    if (item.first.IsScalar()) {
      const auto [first, is_new] = keys.emplace(item.first.Scalar(), item.first);
      TRAINRT_REQUIRE(is_new,
                      kInvalidArgument,
                      yaml_location(where, item.first),
                      ": '",
                      item.first.Scalar(),
                      "' is given twice, first at ",
                      yaml_location(where, first->second),
                      "; keep one of them");
    }
    refuse_repeated_keys(item.second, where);
  }
}

}  // namespace

YAML::Node parse_yaml(const std::string& text, const std::string& where) {
  YAML::Node root;
  try {
    root = YAML::Load(text);
  } catch (const YAML::Exception& error) {
    TRAINRT_FAIL(kInvalidArgument, where, ": not YAML: ", error.what());
  }
  refuse_repeated_keys(root, where);
  return root;
}

}  // namespace trainrt
