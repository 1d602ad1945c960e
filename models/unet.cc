// UNet for segmentation (Ronneberger et al., arXiv 1505.04597) with GroupNorm: strided pooling
// down, transposed convolutions up, skip connections by concatenation. One class score per pixel.
#include "models/onnx_builder.h"

namespace trainrt {

namespace {

ValueId double_conv(OnnxBuilder& b, ValueId x, int64_t out, const std::string& name) {
  for (int i = 1; i <= 2; ++i) {
    const std::string part = name + "." + std::to_string(i);
    x = b.conv(x, out, part + ".conv", {.kernel = 3});
    x = b.relu(b.group_norm(x, 8, part + ".norm"));
  }
  return x;
}

Graph build(const ModelSpec& spec, int64_t batch) {
  require_multiple(spec.hidden, "hidden", 8, "the number of norm groups");
  require_multiple(spec.image, "image", side_for_halvings(spec.layers, "unet"), "2^layers");
  OnnxBuilder b(spec.seed);
  ValueId x = b.input("input", DType::kFloat32, {batch, spec.channels, spec.image, spec.image});
  std::vector<ValueId> skips;
  for (int64_t i = 0; i < spec.layers; ++i) {
    x = double_conv(b, x, spec.hidden << i, "down" + std::to_string(i));
    skips.push_back(x);
    x = b.pool("MaxPool", x, 2, 2, 0);
  }
  x = double_conv(b, x, spec.hidden << spec.layers, "middle");
  for (int64_t i = spec.layers; i-- > 0;) {
    const std::string name = "up" + std::to_string(i);
    x = b.conv_transpose(x, spec.hidden << i, name + ".up", 2, 2);
    x = double_conv(b, b.concat({skips[static_cast<size_t>(i)], x}, 1), spec.hidden << i, name);
  }
  b.output(b.conv(x, spec.classes, "head", {.kernel = 1, .bias = true}), "logits");
  return std::move(b.graph());
}

const RegisterModel kUnet{{
    .name = "unet",
    .defaults = {.layers = 4, .hidden = 64, .classes = 2, .image = 256, .channels = 3},
    .sizes = {},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
