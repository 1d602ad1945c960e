// Example models: one builder per family, each a forward Graph of plain ONNX operators (opset 17)
// with lazily drawn initial weights, a batch axis, logits as output and no loss.
//
// Sizes that a family does not use are ignored; 0 means the family's default.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"

namespace trainrt {

struct ModelSpec {
  std::string family =
      {};              // mlp lenet cnn resnet densenet mobilenet vit bert gpt2 llama t5 unet lstm
  int64_t layers = 0;  // blocks; resnet: 18, 34, 50, 101, 152; densenet: 121 ...
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  // llama: fewer than heads for grouped-query attention
  int64_t ffn = 0;
  int64_t vocab = 0;
  int64_t seq = 0;
  int64_t classes = 0;
  int64_t image = 0;          // side of a square image
  int64_t channels = 0;       // of the image
  double dropout = -1;        // < 0: the family's default
  bool symbolic_seq = false;  // samples of any length up to seq; gpt2 only
  uint64_t seed = 0;          // of the initial weights
};

// The opset that builders write.
inline constexpr int kModelOpset = 17;

// A family's name with its defaults, or a named size ("resnet50", "gpt3-175b", "bert-large").
// Throws kInvalidArgument with near names.
ModelSpec named_model(const std::string& name);
std::vector<std::string> model_families();
std::vector<std::string> model_names();  // named sizes
// The sizes of a family: 0, or a dropout below 0, where it has none such.
const ModelSpec& model_defaults(const std::string& family);

// Throws kInvalidArgument for sizes that contradict each other (hidden not a multiple of heads).
Graph build_model(const ModelSpec& spec, int64_t batch = 1);

// One family: registered from its own file.
struct ModelFamily {
  std::string name;
  ModelSpec defaults;
  std::vector<std::pair<std::string, ModelSpec>> sizes;
  Graph (*build)(const ModelSpec& spec, int64_t batch);
};
struct RegisterModel {
  explicit RegisterModel(ModelFamily family);
};

}  // namespace trainrt
