// MobileNetV2 (Sandler et al., arXiv 1801.04381, table 2): inverted residuals with linear
// bottlenecks and depthwise convolutions.
#include "models/onnx_builder.h"

namespace trainrt {

namespace {

struct Stage {
  int64_t expansion, out, repeats, stride;
};

constexpr Stage kStages[] = {{1, 16, 1, 1},
                             {6, 24, 2, 2},
                             {6, 32, 3, 2},
                             {6, 64, 4, 2},
                             {6, 96, 3, 1},
                             {6, 160, 3, 2},
                             {6, 320, 1, 1}};

ValueId relu6(OnnxBuilder& b, ValueId x) {
  return b.op("Clip", {x, b.scalar(0), b.scalar(6)}, b.shape(x));
}

ValueId inverted_residual(
    OnnxBuilder& b, ValueId x, const Stage& stage, int64_t stride, const std::string& name) {
  const int64_t in = b.shape(x)[1];
  const int64_t wide = in * stage.expansion;
  ValueId y = x;
  if (stage.expansion != 1) {
    y = b.conv(y, wide, name + ".expand", {.kernel = 1});
    y = relu6(b, b.batch_norm(y, name + ".expand_bn"));
  }
  y = b.conv(y, wide, name + ".depthwise", {.kernel = 3, .stride = stride, .groups = wide});
  y = relu6(b, b.batch_norm(y, name + ".depthwise_bn"));
  y = b.batch_norm(b.conv(y, stage.out, name + ".project", {.kernel = 1}), name + ".project_bn");
  return stride == 1 && in == stage.out ? b.add(x, y) : y;
}

Graph build(const ModelSpec& spec, int64_t batch) {
  OnnxBuilder b(spec.seed);
  ValueId x = b.input("input", DType::kFloat32, {batch, spec.channels, spec.image, spec.image});
  x = b.conv(x, spec.hidden, "features.0", {.kernel = 3, .stride = 2});
  x = relu6(b, b.batch_norm(x, "features.0_bn"));
  int index = 1;
  for (const Stage& stage : kStages) {
    for (int64_t i = 0; i < stage.repeats; ++i) {
      x = inverted_residual(
          b, x, stage, i == 0 ? stage.stride : 1, "features." + std::to_string(index++));
    }
  }
  x = b.conv(x, 1280, "features.18", {.kernel = 1});
  x = b.global_average_pool(relu6(b, b.batch_norm(x, "features.18_bn")));
  b.output(b.dense(b.dropout(x, spec.dropout), spec.classes, "classifier"), "logits");
  return std::move(b.graph());
}

const RegisterModel kMobilenet{{
    .name = "mobilenet",
    .defaults = {.hidden = 32, .classes = 1000, .image = 224, .channels = 3, .dropout = 0.2},
    .sizes = {{"mobilenet_v2", {}}},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
