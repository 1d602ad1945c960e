// DenseNet-BC (Huang et al., arXiv 1608.06993, table 1): each layer's output joins the input of all
// later layers of its block.
#include "models/onnx_builder.h"

namespace trainrt {

namespace {

std::vector<int64_t> block_sizes(int64_t layers) {
  switch (layers) {
    case 121:
      return {6, 12, 24, 16};
    case 169:
      return {6, 12, 32, 32};
    case 201:
      return {6, 12, 48, 32};
    default:
      TRAINRT_FAIL(kInvalidArgument, "densenet has 121, 169 or 201 layers, got ", layers);
  }
}

Graph build(const ModelSpec& spec, int64_t batch) {
  const std::vector<int64_t> blocks = block_sizes(spec.layers);
  const int64_t growth = spec.hidden;
  require_image(spec.image, 29, "densenet");  // 29 -> 15 -> 8 -> 4 -> 2 -> 1
  OnnxBuilder b(spec.seed);
  ValueId x = b.input("input", DType::kFloat32, {batch, spec.channels, spec.image, spec.image});
  x = b.conv(x, 2 * growth, "features.conv0", {.kernel = 7, .stride = 2});
  x = b.pool("MaxPool", b.relu(b.batch_norm(x, "features.norm0")), 3, 2, 1);
  for (size_t i = 0; i < blocks.size(); ++i) {
    const std::string block = "features.denseblock" + std::to_string(i + 1);
    for (int64_t j = 0; j < blocks[i]; ++j) {
      const std::string layer = block + ".denselayer" + std::to_string(j + 1);
      ValueId y = b.relu(b.batch_norm(x, layer + ".norm1"));
      y = b.conv(y, 4 * growth, layer + ".conv1", {.kernel = 1});
      y = b.relu(b.batch_norm(y, layer + ".norm2"));
      y = b.conv(y, growth, layer + ".conv2", {.kernel = 3});
      x = b.concat({x, y}, 1);
    }
    if (i + 1 < blocks.size()) {
      const std::string transition = "features.transition" + std::to_string(i + 1);
      x = b.relu(b.batch_norm(x, transition + ".norm"));
      x = b.conv(x, b.shape(x)[1] / 2, transition + ".conv", {.kernel = 1});
      x = b.pool("AveragePool", x, 2, 2, 0);
    }
  }
  x = b.relu(b.batch_norm(x, "features.norm5"));
  b.output(b.dense(b.global_average_pool(x), spec.classes, "classifier"), "logits");
  return std::move(b.graph());
}

const RegisterModel kDensenet{{
    .name = "densenet",
    .defaults = {.layers = 121, .hidden = 32, .classes = 1000, .image = 224, .channels = 3},
    .sizes = {{"densenet121", {.layers = 121}},
              {"densenet169", {.layers = 169}},
              {"densenet201", {.layers = 201}}},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
