#include "models/model.h"

#include <map>

#include "graph/base/error.h"

namespace trainrt {

namespace {

std::map<std::string, ModelFamily>& families() {
  static std::map<std::string, ModelFamily> instance;
  return instance;
}

void fill(int64_t& field, int64_t value) {
  field = field == 0 ? value : field;
}

// Sizes left open take the family's defaults. ffn and kv_heads follow from the sizes that were
// given, so that `--hidden 256` alone gives a model of the family's proportions.
ModelSpec complete(ModelSpec spec, const ModelSpec& defaults) {
  if (spec.ffn == 0 && spec.hidden != 0 && defaults.hidden != 0) {
    spec.ffn = spec.hidden * defaults.ffn / defaults.hidden;
  }
  if (spec.kv_heads == 0 && spec.heads != 0) {
    spec.kv_heads = spec.heads;
  }
  fill(spec.layers, defaults.layers);
  fill(spec.hidden, defaults.hidden);
  fill(spec.heads, defaults.heads);
  fill(spec.kv_heads, defaults.kv_heads == 0 ? spec.heads : defaults.kv_heads);
  fill(spec.ffn, defaults.ffn);
  fill(spec.vocab, defaults.vocab);
  fill(spec.seq, defaults.seq);
  fill(spec.classes, defaults.classes);
  fill(spec.image, defaults.image);
  fill(spec.channels, defaults.channels);
  spec.dropout = spec.dropout < 0 ? defaults.dropout : spec.dropout;
  return spec;
}

const ModelFamily& find_family(const std::string& name) {
  const auto it = families().find(name);
  TRAINRT_REQUIRE(it != families().end(),
                  kInvalidArgument,
                  "there is no model family '",
                  name,
                  "'",
                  did_you_mean(name, model_families()));
  return it->second;
}

}  // namespace

RegisterModel::RegisterModel(ModelFamily family) {
  families()[family.name] = std::move(family);
}

std::vector<std::string> model_families() {
  std::vector<std::string> names;
  for (const auto& [name, family] : families()) {
    names.push_back(name);
  }
  return names;
}

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& [name, family] : families()) {
    for (const auto& [size_name, spec] : family.sizes) {
      names.push_back(size_name);
    }
  }
  return names;
}

ModelSpec named_model(const std::string& name) {
  for (const auto& [family_name, family] : families()) {
    if (family_name == name) {
      ModelSpec spec;
      spec.family = name;
      return spec;
    }
    for (const auto& [size_name, sizes] : family.sizes) {
      if (size_name == name) {
        ModelSpec spec = sizes;
        spec.family = family_name;
        return spec;
      }
    }
  }
  std::vector<std::string> known = model_families();
  for (const std::string& size_name : model_names()) {
    known.push_back(size_name);
  }
  TRAINRT_FAIL(kInvalidArgument,
               "there is no model '",
               name,
               "'",
               did_you_mean(name, known),
               " (families and named sizes: trainrt model --help)");
}

const ModelSpec& model_defaults(const std::string& family) {
  return find_family(family).defaults;
}

Graph build_model(const ModelSpec& spec, int64_t batch) {
  const ModelFamily& family = find_family(spec.family);
  const ModelSpec full = complete(spec, family.defaults);
  for (const int64_t size : {full.layers,
                             full.hidden,
                             full.heads,
                             full.kv_heads,
                             full.ffn,
                             full.vocab,
                             full.seq,
                             full.classes,
                             full.image,
                             full.channels}) {
    TRAINRT_REQUIRE(size >= 0, kInvalidArgument, "model sizes must be positive, got ", size);
  }
  TRAINRT_REQUIRE(!full.symbolic_seq || full.family == "gpt2",
                  kInvalidArgument,
                  "only gpt2 is written with a symbolic sequence dim, not ",
                  full.family);
  return family.build(full, batch);
}

}  // namespace trainrt
