// GPT-2 (Radford et al., 2019): pre-LayerNorm decoder blocks, learned positions, a head tied to the
// token embedding. GPT-3's sizes are those of Brown et al., arXiv 2005.14165, table 2.1; the larger
// ones those of Narayanan et al. 2021, table 1, and Korthikanti et al. 2022, table 3.
#include <cmath>

#include "models/onnx_builder.h"

namespace trainrt {

namespace {

ValueId self_attention(OnnxBuilder& b,
                       ValueId x,
                       const ModelSpec& spec,
                       ValueId mask,
                       double residual_stddev,
                       const std::string& name) {
  const auto heads = [&](const std::string& part) {
    return b.split_heads(b.linear(x, spec.hidden, name + part, 0.02), spec.heads);
  };
  const ValueId q = heads(".q"), k = heads(".k"), v = heads(".v");
  const double scale = 1 / std::sqrt(static_cast<double>(spec.hidden / spec.heads));
  const ValueId y = b.merge_heads(b.attention(q, k, v, scale, mask, spec.dropout));
  return b.dropout(b.linear(y, spec.hidden, name + ".proj", residual_stddev), spec.dropout);
}

Graph build(const ModelSpec& spec, int64_t batch) {
  require_multiple(spec.hidden, "hidden", spec.heads, "heads");
  OnnxBuilder b(spec.seed, spec.symbolic_seq);
  const ValueId ids = b.input("input_ids", DType::kInt64, {batch, spec.seq});
  ValueId table = kNoValue;
  ValueId x = b.embedding(ids, spec.vocab, spec.hidden, "wte", 0.02, &table);
  const ValueId places = b.normal("wpe.weight", {spec.seq, spec.hidden}, 0.02);
  x = b.add(x, spec.symbolic_seq ? b.gather(places, b.positions(ids)) : places);
  x = b.dropout(x, spec.dropout);
  const ValueId mask = b.causal_mask(ids);
  // Projections that end on the residual stream start smaller by sqrt(2 * layers).
  const double residual_stddev = 0.02 / std::sqrt(2.0 * static_cast<double>(spec.layers));
  for (int64_t i = 0; i < spec.layers; ++i) {
    const std::string name = "h." + std::to_string(i);
    x = b.add(x,
              self_attention(
                  b, b.layer_norm(x, name + ".ln_1"), spec, mask, residual_stddev, name + ".attn"));
    ValueId y = b.linear(b.layer_norm(x, name + ".ln_2"), spec.ffn, name + ".mlp.fc", 0.02);
    y = b.linear(b.gelu_tanh(y), spec.hidden, name + ".mlp.proj", residual_stddev);
    x = b.add(x, b.dropout(y, spec.dropout));
  }
  x = b.layer_norm(x, "ln_f");
  b.output(b.matmul(x, b.transpose(table, {1, 0})), "logits");
  return std::move(b.graph());
}

constexpr ModelSpec size(
    int64_t layers, int64_t hidden, int64_t heads, int64_t seq, int64_t vocab) {
  ModelSpec spec;
  spec.layers = layers;
  spec.hidden = hidden;
  spec.heads = heads;
  spec.seq = seq;
  spec.vocab = vocab;
  return spec;
}

const RegisterModel kGpt2{{
    .name = "gpt2",
    .defaults = {.layers = 12,
                 .hidden = 768,
                 .heads = 12,
                 .ffn = 3072,
                 .vocab = 50257,
                 .seq = 1024,
                 .dropout = 0},
    .sizes = {{"gpt2-124m", size(12, 768, 12, 1024, 50257)},
              {"gpt2-355m", size(24, 1024, 16, 1024, 50257)},
              {"gpt2-774m", size(36, 1280, 20, 1024, 50257)},
              {"gpt2-1.5b", size(48, 1600, 25, 1024, 50257)},
              {"gpt3-1.3b", size(24, 2048, 16, 2048, 51200)},
              {"gpt3-6.7b", size(32, 4096, 32, 2048, 51200)},
              {"gpt3-13b", size(40, 5120, 40, 2048, 51200)},
              {"gpt3-175b", size(96, 12288, 96, 2048, 51200)},
              {"gpt-22b", size(48, 6144, 64, 2048, 51200)},
              {"gpt-530b", size(105, 20480, 128, 2048, 51200)},
              {"gpt-1t", size(128, 25600, 160, 2048, 51200)}},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
