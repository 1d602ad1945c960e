// Multi-layer perceptron over flattened images: 784-1024-1024-10 by default.
#include "models/onnx_builder.h"

namespace trainrt {

namespace {

Graph build(const ModelSpec& spec, int64_t batch) {
  OnnxBuilder b(spec.seed);
  ValueId x = b.input("input", DType::kFloat32, {batch, spec.image * spec.image * spec.channels});
  for (int64_t i = 0; i < spec.layers; ++i) {
    x = b.relu(b.dense(x, spec.hidden, "fc" + std::to_string(i + 1)));
    x = b.dropout(x, spec.dropout);
  }
  b.output(b.dense(x, spec.classes, "fc" + std::to_string(spec.layers + 1)), "logits");
  return std::move(b.graph());
}

const RegisterModel kMlp{{
    .name = "mlp",
    .defaults =
        {.layers = 2, .hidden = 1024, .classes = 10, .image = 28, .channels = 1, .dropout = 0},
    .sizes = {},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
