// Vision Transformer (Dosovitskiy et al., arXiv 2010.11929, table 1): 16 x 16 patches by a strided
// convolution, a class token, learned positions, pre-LayerNorm blocks.
#include <cmath>

#include "models/onnx_builder.h"

namespace trainrt {

namespace {

constexpr int64_t kPatch = 16;

// The class token repeated for every sample: the batch is read off x at run time, as exporters do.
ValueId class_token(OnnxBuilder& b, ValueId x, int64_t hidden) {
  const int64_t batch = b.shape(x)[0];
  const ValueId token = b.normal("class_token", {1, 1, hidden}, 0.02);
  const ValueId dims = b.node("Shape", {x}, {{DType::kInt64, {3}}}).at(0);
  const ValueId size = b.slice(dims, 0, 0, 1);
  const ValueId rest = b.constant(Tensor::from(std::vector<int64_t>{1, hidden}, {2}));
  return b.op("Expand", {token, b.concat({size, rest}, 0)}, {batch, 1, hidden});
}

Graph build(const ModelSpec& spec, int64_t batch) {
  require_multiple(spec.hidden, "hidden", spec.heads, "heads");
  require_multiple(spec.image, "image", kPatch, "the patch size");
  OnnxBuilder b(spec.seed);
  ValueId x = b.input("input", DType::kFloat32, {batch, spec.channels, spec.image, spec.image});
  x = b.conv(
      x, spec.hidden, "conv_proj", {.kernel = kPatch, .stride = kPatch, .pad = 0, .bias = true});
  const int64_t patches = b.shape(x)[2] * b.shape(x)[3];
  x = b.transpose(b.reshape(x, {batch, spec.hidden, patches}), {0, 2, 1});
  x = b.concat({class_token(b, x, spec.hidden), x}, 1);
  x = b.add(x, b.normal("pos_embedding", {1, patches + 1, spec.hidden}, 0.02));
  x = b.dropout(x, spec.dropout);
  const double stddev = 1 / std::sqrt(static_cast<double>(spec.hidden));
  const double scale = 1 / std::sqrt(static_cast<double>(spec.hidden / spec.heads));
  for (int64_t i = 0; i < spec.layers; ++i) {
    const std::string name = "encoder.layers." + std::to_string(i);
    const ValueId in = b.layer_norm(x, name + ".ln_1", 1e-6);
    const auto heads = [&](const std::string& part) {
      return b.split_heads(b.linear(in, spec.hidden, name + ".self_attention." + part, stddev),
                           spec.heads);
    };
    const ValueId q = heads("q"), k = heads("k"), v = heads("v");
    ValueId y = b.merge_heads(b.attention(q, k, v, scale, kNoValue, spec.dropout));
    y = b.linear(y, spec.hidden, name + ".self_attention.out_proj", stddev);
    x = b.add(x, b.dropout(y, spec.dropout));
    y = b.linear(b.layer_norm(x, name + ".ln_2", 1e-6), spec.ffn, name + ".mlp.0", stddev);
    y = b.linear(b.gelu(y), spec.hidden, name + ".mlp.3", stddev / 2);
    x = b.add(x, b.dropout(y, spec.dropout));
  }
  x = b.layer_norm(x, "encoder.ln", 1e-6);
  const ValueId token = b.reshape(b.slice(x, 1, 0, 1), {batch, spec.hidden});
  b.output(b.dense(token, spec.classes, "heads.head"), "logits");
  return std::move(b.graph());
}

const RegisterModel kVit{{
    .name = "vit",
    .defaults = {.layers = 12,
                 .hidden = 768,
                 .heads = 12,
                 .ffn = 3072,
                 .classes = 1000,
                 .image = 224,
                 .channels = 3,
                 .dropout = 0},
    .sizes = {{"vit_b16", {.layers = 12, .hidden = 768, .heads = 12}},
              {"vit_l16", {.layers = 24, .hidden = 1024, .heads = 16}}},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
