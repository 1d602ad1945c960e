#include "parallel/yaml_text.h"

#include <map>
#include <vector>

#include "graph/base/error.h"

namespace trainrt {

std::string yaml_location(const std::string& where, const YAML::Node& node) {
  return node.Mark().is_null() ? where : concat(where, ":", node.Mark().line + 1);
}

namespace {

// Walks a document as its readers will, aliases followed.
class DocumentCheck {
 public:
  explicit DocumentCheck(const std::string& where) : where_(where) {}

  void walk(const YAML::Node& node) {
    ++count_;
    TRAINRT_REQUIRE(count_ <= kMostYamlNodes,
                    kInvalidArgument,
                    where_,
                    ": has more than ",
                    kMostYamlNodes,
                    " values, counted with what its aliases (*name) stand for; write fewer");
    if (node.IsSequence() || node.IsMap()) {
      enter(node);
      node.IsMap() ? walk_map(node) : walk_items(node);
      above_.pop_back();
    }
  }

 private:
  std::string at(const YAML::Node& node) const { return yaml_location(where_, node); }

  void enter(const YAML::Node& node) {
    for (const YAML::Node& outer : above_) {
      TRAINRT_REQUIRE(!outer.is(node),
                      kInvalidArgument,
                      at(node),
                      ": this ",
                      node.IsMap() ? "map" : "list",
                      " contains itself through an alias (*name); write out what is meant");
    }
    TRAINRT_REQUIRE(static_cast<int>(above_.size()) < kMostYamlDepth,
                    kInvalidArgument,
                    at(node),
                    ": lists and maps are nested more than ",
                    kMostYamlDepth,
                    " deep");
    above_.push_back(node);
  }

  void walk_items(const YAML::Node& node) {
    for (const YAML::Node& item : node) {
      walk(item);
    }
  }

  void walk_map(const YAML::Node& node) {
    std::map<std::string, YAML::Node> keys;
    for (const auto& item : node) {
      TRAINRT_REQUIRE(!item.first.IsSequence() && !item.first.IsMap(),
                      kInvalidArgument,
                      at(item.first),
                      ": a key is a ",
                      item.first.IsMap() ? "map" : "list",
                      "; wanted a word");
      if (item.first.IsScalar()) {
        const auto [first, is_new] = keys.emplace(item.first.Scalar(), item.first);
        TRAINRT_REQUIRE(is_new,
                        kInvalidArgument,
                        at(item.first),
                        ": '",
                        item.first.Scalar(),
                        "' is given twice, first at ",
                        at(first->second),
                        "; keep one of them");
      }
      walk(item.second);
    }
  }

  const std::string& where_;
  int count_ = 0;
  std::vector<YAML::Node> above_;  // the lists and maps around what is walked
};

}  // namespace

YAML::Node parse_yaml(const std::string& text, const std::string& where) {
  std::vector<YAML::Node> documents;
  try {
    documents = YAML::LoadAll(text);
  } catch (const YAML::Exception& error) {
    TRAINRT_FAIL(kInvalidArgument, where, ": not YAML: ", error.what());
  }
  std::erase_if(documents, [](const YAML::Node& document) { return document.IsNull(); });
  if (documents.empty()) {
    return YAML::Node();
  }
  TRAINRT_REQUIRE(documents.size() == 1,
                  kInvalidArgument,
                  yaml_location(where, documents[1]),
                  ": a second document begins here; wanted one, without '---' between its lines");
  DocumentCheck(where).walk(documents[0]);
  return documents[0];
}

}  // namespace trainrt
