// LLaMA (Touvron et al., arXiv 2302.13971; Llama 3: arXiv 2407.21783, table 3): RMSNorm, rotary
// positions, SwiGLU, grouped-query attention, an untied head.
#include <cmath>

#include "models/onnx_builder.h"

namespace trainrt {

namespace {

constexpr double kRopeBase = 500000;  // of Llama 3
constexpr double kNormEps = 1e-5;

struct RotaryTables {
  ValueId cos, sin;  // [seq, d]
};

RotaryTables rotary_tables(OnnxBuilder& b, int64_t seq, int64_t d) {
  std::vector<float> cos_table(static_cast<size_t>(seq * d)), sin_table(cos_table.size());
  for (int64_t position = 0; position < seq; ++position) {
    for (int64_t i = 0; i < d; ++i) {
      const double frequency =
          std::pow(kRopeBase, -2.0 * static_cast<double>(i % (d / 2)) / static_cast<double>(d));
      const double angle = static_cast<double>(position) * frequency;
      cos_table[static_cast<size_t>(position * d + i)] = static_cast<float>(std::cos(angle));
      sin_table[static_cast<size_t>(position * d + i)] = static_cast<float>(std::sin(angle));
    }
  }
  return {b.constant(Tensor::from(cos_table, {seq, d})),
          b.constant(Tensor::from(sin_table, {seq, d}))};
}

// x cos + rotate_half(x) sin, rotate_half([a, b]) = [-b, a] (Su et al., arXiv 2104.09864, eq. 34).
ValueId rotate(OnnxBuilder& b, ValueId x, const RotaryTables& tables) {
  const int64_t d = b.shape(x)[3];
  const ValueId half =
      b.concat({b.unary("Neg", b.slice(x, 3, d / 2, d)), b.slice(x, 3, 0, d / 2)}, 3);
  return b.add(b.mul(x, tables.cos), b.mul(half, tables.sin));
}

// Each key-value head serves heads / kv_heads query heads: [b, kv, s, d] -> [b, heads, s, d].
ValueId repeat_heads(OnnxBuilder& b, ValueId x, int64_t heads) {
  const Shape s = b.shape(x);
  if (s[1] == heads) {
    return x;
  }
  const int64_t repeats = heads / s[1];
  const ValueId parts = b.reshape(x, {s[0], s[1], 1, s[2], s[3]});
  // Ones in all but the repeated dim: Expand broadcasts, so the batch needs no number.
  const Shape target = {1, 1, repeats, 1, 1};
  const ValueId dims = b.constant(Tensor::from(target, {5}));
  const ValueId wide = b.op("Expand", {parts, dims}, {s[0], s[1], repeats, s[2], s[3]});
  return b.reshape(wide, {s[0], heads, s[2], s[3]});
}

Graph build(const ModelSpec& spec, int64_t batch) {
  require_multiple(spec.hidden, "hidden", spec.heads, "heads");
  require_multiple(spec.heads, "heads", spec.kv_heads, "kv-heads");
  const int64_t d = spec.hidden / spec.heads;
  require_multiple(d, "hidden / heads", 2, "two (rotary halves)");
  OnnxBuilder b(spec.seed);
  const ValueId ids = b.input("input_ids", DType::kInt64, {batch, spec.seq});
  ValueId x = b.embedding(ids, spec.vocab, spec.hidden, "embed_tokens", 0.02);
  const RotaryTables tables = rotary_tables(b, spec.seq, d);
  const ValueId mask = b.causal_mask(ids);
  for (int64_t i = 0; i < spec.layers; ++i) {
    const std::string name = "layers." + std::to_string(i);
    ValueId y = b.rms_norm(x, name + ".input_layernorm", kNormEps);
    const auto heads = [&](const std::string& part, int64_t count) {
      return b.split_heads(b.linear(y, count * d, name + ".self_attn." + part, 0.02, false), count);
    };
    const ValueId q = rotate(b, heads("q_proj", spec.heads), tables);
    const ValueId k = rotate(b, heads("k_proj", spec.kv_heads), tables);
    const ValueId v = heads("v_proj", spec.kv_heads);
    y = b.attention(q,
                    repeat_heads(b, k, spec.heads),
                    repeat_heads(b, v, spec.heads),
                    1 / std::sqrt(static_cast<double>(d)),
                    mask,
                    0);
    x = b.add(x, b.linear(b.merge_heads(y), spec.hidden, name + ".self_attn.o_proj", 0.02, false));
    y = b.rms_norm(x, name + ".post_attention_layernorm", kNormEps);
    const ValueId gate = b.silu(b.linear(y, spec.ffn, name + ".mlp.gate_proj", 0.02, false));
    const ValueId up = b.linear(y, spec.ffn, name + ".mlp.up_proj", 0.02, false);
    x = b.add(x, b.linear(b.mul(gate, up), spec.hidden, name + ".mlp.down_proj", 0.02, false));
  }
  x = b.rms_norm(x, "norm", kNormEps);
  b.output(b.linear(x, spec.vocab, "lm_head", 0.02, false), "logits");
  return std::move(b.graph());
}

constexpr ModelSpec size(int64_t layers,
                         int64_t hidden,
                         int64_t heads,
                         int64_t kv_heads,
                         int64_t ffn,
                         int64_t vocab,
                         int64_t seq) {
  ModelSpec spec;
  spec.layers = layers;
  spec.hidden = hidden;
  spec.heads = heads;
  spec.kv_heads = kv_heads;
  spec.ffn = ffn;
  spec.vocab = vocab;
  spec.seq = seq;
  return spec;
}

const RegisterModel kLlama{{
    .name = "llama",
    .defaults = {.layers = 12,
                 .hidden = 768,
                 .heads = 12,
                 .kv_heads = 4,
                 .ffn = 2048,
                 .vocab = 32000,
                 .seq = 1024},
    .sizes = {{"llama-7b", size(32, 4096, 32, 32, 11008, 32000, 4096)},
              {"llama-13b", size(40, 5120, 40, 40, 13824, 32000, 4096)},
              {"llama-8b", size(32, 4096, 32, 8, 14336, 128256, 8192)},
              {"llama-70b", size(80, 8192, 64, 8, 28672, 128256, 8192)},
              {"llama-405b", size(126, 16384, 128, 8, 53248, 128256, 8192)}},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
