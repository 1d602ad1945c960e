// Residual networks (He et al., arXiv 1512.03385, table 1), in the v1.5 form: the stride of a
// bottleneck stands in its 3x3 convolution.
#include "models/onnx_builder.h"

namespace trainrt {

namespace {

struct Depth {
  int64_t layers;
  bool bottleneck;
  std::vector<int64_t> blocks;
};

const std::vector<Depth>& depths() {
  static const std::vector<Depth> table = {{18, false, {2, 2, 2, 2}},
                                           {34, false, {3, 4, 6, 3}},
                                           {50, true, {3, 4, 6, 3}},
                                           {101, true, {3, 4, 23, 3}},
                                           {152, true, {3, 8, 36, 3}}};
  return table;
}

const Depth& find_depth(int64_t layers) {
  for (const Depth& depth : depths()) {
    if (depth.layers == layers) {
      return depth;
    }
  }
  TRAINRT_FAIL(kInvalidArgument, "resnet has 18, 34, 50, 101 or 152 layers, got ", layers);
}

ValueId conv_bn(OnnxBuilder& b,
                ValueId x,
                int64_t out,
                const std::string& conv,
                const std::string& bn,
                int64_t kernel,
                int64_t stride) {
  return b.batch_norm(b.conv(x, out, conv, {.kernel = kernel, .stride = stride}), bn);
}

ValueId block(OnnxBuilder& b,
              ValueId x,
              int64_t width,
              int64_t stride,
              bool bottleneck,
              const std::string& name) {
  const int64_t out = bottleneck ? width * 4 : width;
  ValueId shortcut = x;
  if (stride != 1 || b.shape(x)[1] != out) {
    shortcut = conv_bn(b, x, out, name + ".downsample.0", name + ".downsample.1", 1, stride);
  }
  ValueId y = x;
  if (bottleneck) {
    y = b.relu(conv_bn(b, y, width, name + ".conv1", name + ".bn1", 1, 1));
    y = b.relu(conv_bn(b, y, width, name + ".conv2", name + ".bn2", 3, stride));
    y = conv_bn(b, y, out, name + ".conv3", name + ".bn3", 1, 1);
  } else {
    y = b.relu(conv_bn(b, y, width, name + ".conv1", name + ".bn1", 3, stride));
    y = conv_bn(b, y, out, name + ".conv2", name + ".bn2", 3, 1);
  }
  return b.relu(b.add(y, shortcut));
}

Graph build(const ModelSpec& spec, int64_t batch) {
  const Depth& depth = find_depth(spec.layers);
  OnnxBuilder b(spec.seed);
  ValueId x = b.input("input", DType::kFloat32, {batch, spec.channels, spec.image, spec.image});
  x = b.relu(conv_bn(b, x, spec.hidden, "conv1", "bn1", 7, 2));
  x = b.pool("MaxPool", x, 3, 2, 1);
  for (int64_t stage = 0; stage < 4; ++stage) {
    for (int64_t i = 0; i < depth.blocks[static_cast<size_t>(stage)]; ++i) {
      const std::string name = "layer" + std::to_string(stage + 1) + "." + std::to_string(i);
      x = block(b, x, spec.hidden << stage, stage > 0 && i == 0 ? 2 : 1, depth.bottleneck, name);
    }
  }
  b.output(b.dense(b.global_average_pool(x), spec.classes, "fc"), "logits");
  return std::move(b.graph());
}

const RegisterModel kResnet{{
    .name = "resnet",
    .defaults = {.layers = 50, .hidden = 64, .classes = 1000, .image = 224, .channels = 3},
    .sizes = {{"resnet18", {.layers = 18}},
              {"resnet34", {.layers = 34}},
              {"resnet50", {.layers = 50}},
              {"resnet101", {.layers = 101}},
              {"resnet152", {.layers = 152}}},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
