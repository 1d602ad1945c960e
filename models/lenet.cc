// LeNet-5 (LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998, figure 2)
// with ReLU and max pooling.
#include "models/onnx_builder.h"

namespace trainrt {

namespace {

Graph build(const ModelSpec& spec, int64_t batch) {
  require_image(spec.image, 12, "lenet");  // 12 -> 6 -> 2 -> 1
  OnnxBuilder b(spec.seed);
  ValueId x = b.input("input", DType::kFloat32, {batch, spec.channels, spec.image, spec.image});
  x = b.relu(b.conv(x, 6, "conv1", {.kernel = 5, .pad = 2, .bias = true}));
  x = b.pool("MaxPool", x, 2, 2, 0);
  x = b.relu(b.conv(x, 16, "conv2", {.kernel = 5, .pad = 0, .bias = true}));
  x = b.flatten(b.pool("MaxPool", x, 2, 2, 0));
  x = b.relu(b.dense(x, 120, "fc1"));
  x = b.relu(b.dense(x, 84, "fc2"));
  b.output(b.dense(x, spec.classes, "fc3"), "logits");
  return std::move(b.graph());
}

const RegisterModel kLenet{{
    .name = "lenet",
    .defaults = {.classes = 10, .image = 28, .channels = 1},
    .sizes = {},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
