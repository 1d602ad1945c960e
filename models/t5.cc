// T5 (Raffel et al., arXiv 1910.10683): an encoder and a decoder of pre-RMSNorm blocks, ReLU, no
// scaling of the attention scores, and a learned bias per head and bucketed relative position that
// all layers of a stack share.
#include <cmath>

#include "models/onnx_builder.h"

namespace trainrt {

namespace {

constexpr int64_t kBuckets = 32;
constexpr int64_t kMaxDistance = 128;
constexpr double kNormEps = 1e-6;

// Half of the buckets are exact distances, the rest grow logarithmically up to kMaxDistance.
int64_t bucket(int64_t relative_position, bool bidirectional) {
  int64_t buckets = kBuckets, offset = 0;
  int64_t distance = -relative_position;
  if (bidirectional) {
    buckets /= 2;
    offset = distance < 0 ? buckets : 0;
    distance = std::abs(distance);
  } else {
    distance = std::max<int64_t>(distance, 0);
  }
  const int64_t exact = buckets / 2;
  if (distance < exact) {
    return offset + distance;
  }
  const double ratio = std::log(static_cast<double>(distance) / static_cast<double>(exact)) /
                       std::log(static_cast<double>(kMaxDistance) / static_cast<double>(exact));
  const int64_t large = exact + static_cast<int64_t>(ratio * static_cast<double>(buckets - exact));
  return offset + std::min(large, buckets - 1);
}

ValueId position_bias(OnnxBuilder& b,
                      const ModelSpec& spec,
                      bool bidirectional,
                      const std::string& name) {
  std::vector<int64_t> buckets;
  for (int64_t query = 0; query < spec.seq; ++query) {
    for (int64_t key = 0; key < spec.seq; ++key) {
      buckets.push_back(bucket(key - query, bidirectional));
    }
  }
  const ValueId table = b.normal(name + ".relative_attention_bias", {kBuckets, spec.heads}, 0.1);
  const ValueId bias = b.gather(table, b.constant(Tensor::from(buckets, {spec.seq, spec.seq})));
  return b.transpose(bias, {2, 0, 1});  // [heads, seq, seq]
}

// One attention sub-layer on the residual stream; `memory` is x itself or the encoder's output.
ValueId attention(OnnxBuilder& b,
                  ValueId x,
                  ValueId memory,
                  ValueId bias,
                  const ModelSpec& spec,
                  const std::string& name) {
  const double d_model = static_cast<double>(spec.hidden);
  const double d = static_cast<double>(spec.hidden / spec.heads);
  const ValueId in = b.rms_norm(x, name + ".layer_norm", kNormEps);
  const ValueId source = memory == kNoValue ? in : memory;
  const auto heads = [&](ValueId from, const std::string& part, double stddev) {
    return b.split_heads(b.linear(from, spec.hidden, name + part, stddev, false), spec.heads);
  };
  const ValueId q = heads(in, ".q", 1 / std::sqrt(d_model * d));
  const ValueId k = heads(source, ".k", 1 / std::sqrt(d_model));
  const ValueId v = heads(source, ".v", 1 / std::sqrt(d_model));
  const ValueId y = b.merge_heads(b.attention(q, k, v, 1, bias, spec.dropout));
  return b.add(x, b.linear(y, spec.hidden, name + ".o", 1 / std::sqrt(d_model), false));
}

ValueId feed_forward(OnnxBuilder& b, ValueId x, const ModelSpec& spec, const std::string& name) {
  ValueId y = b.rms_norm(x, name + ".layer_norm", kNormEps);
  const double in = static_cast<double>(spec.hidden), wide = static_cast<double>(spec.ffn);
  y = b.relu(b.linear(y, spec.ffn, name + ".wi", 1 / std::sqrt(in), false));
  y = b.linear(b.dropout(y, spec.dropout), spec.hidden, name + ".wo", 1 / std::sqrt(wide), false);
  return b.add(x, y);
}

Graph build(const ModelSpec& spec, int64_t batch) {
  require_multiple(spec.hidden, "hidden", spec.heads, "heads");
  OnnxBuilder b(spec.seed);
  const ValueId ids = b.input("input_ids", DType::kInt64, {batch, spec.seq});
  const ValueId decoder_ids = b.input("decoder_input_ids", DType::kInt64, {batch, spec.seq});
  ValueId table = kNoValue;
  ValueId x = b.embedding(ids, spec.vocab, spec.hidden, "shared", 1, &table);
  const ValueId encoder_bias = position_bias(b, spec, true, "encoder");
  for (int64_t i = 0; i < spec.layers; ++i) {
    const std::string name = "encoder.block." + std::to_string(i);
    x = attention(b, x, kNoValue, encoder_bias, spec, name + ".self_attention");
    x = feed_forward(b, x, spec, name + ".ff");
  }
  const ValueId memory = b.rms_norm(x, "encoder.final_layer_norm", kNormEps);
  ValueId y = b.gather(table, decoder_ids);
  const ValueId decoder_bias =
      b.add(position_bias(b, spec, false, "decoder"), b.causal_mask(decoder_ids));
  for (int64_t i = 0; i < spec.layers; ++i) {
    const std::string name = "decoder.block." + std::to_string(i);
    y = attention(b, y, kNoValue, decoder_bias, spec, name + ".self_attention");
    y = attention(b, y, memory, kNoValue, spec, name + ".cross_attention");
    y = feed_forward(b, y, spec, name + ".ff");
  }
  y = b.rms_norm(y, "decoder.final_layer_norm", kNormEps);
  // The tied head scales its input by 1 / sqrt(d_model), as the embedding starts with deviation 1.
  y = b.mul(y, b.scalar(1 / std::sqrt(static_cast<double>(spec.hidden))));
  b.output(b.matmul(y, b.transpose(table, {1, 0})), "logits");
  return std::move(b.graph());
}

const RegisterModel kT5{{
    .name = "t5",
    .defaults = {.layers = 6,
                 .hidden = 512,
                 .heads = 8,
                 .ffn = 2048,
                 .vocab = 32128,
                 .seq = 512,
                 .dropout = 0},
    .sizes = {{"t5-small", {.layers = 6, .hidden = 512, .heads = 8}},
              {"t5-base", {.layers = 12, .hidden = 768, .heads = 12}}},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
