// BERT (Devlin et al., arXiv 1810.04805): post-LayerNorm encoder blocks with a masked-token head
// tied to the token embedding.
#include <cmath>

#include "models/onnx_builder.h"

namespace trainrt {

namespace {

Graph build(const ModelSpec& spec, int64_t batch) {
  require_multiple(spec.hidden, "hidden", spec.heads, "heads");
  OnnxBuilder b(spec.seed);
  const ValueId ids = b.input("input_ids", DType::kInt64, {batch, spec.seq});
  const ValueId segments = b.input("token_type_ids", DType::kInt64, {batch, spec.seq});
  ValueId table = kNoValue;
  ValueId x = b.embedding(ids, spec.vocab, spec.hidden, "embeddings.word", 0.02, &table);
  x = b.add(x, b.normal("embeddings.position.weight", {spec.seq, spec.hidden}, 0.02));
  x = b.add(x, b.embedding(segments, 2, spec.hidden, "embeddings.token_type", 0.02));
  x = b.dropout(b.layer_norm(x, "embeddings.LayerNorm", 1e-12), spec.dropout);
  const double scale = 1 / std::sqrt(static_cast<double>(spec.hidden / spec.heads));
  for (int64_t i = 0; i < spec.layers; ++i) {
    const std::string name = "encoder.layer." + std::to_string(i);
    const auto heads = [&](const std::string& part) {
      return b.split_heads(b.linear(x, spec.hidden, name + ".attention." + part, 0.02), spec.heads);
    };
    const ValueId q = heads("query"), k = heads("key"), v = heads("value");
    ValueId y = b.merge_heads(b.attention(q, k, v, scale, kNoValue, spec.dropout));
    y = b.dropout(b.linear(y, spec.hidden, name + ".attention.output", 0.02), spec.dropout);
    x = b.layer_norm(b.add(x, y), name + ".attention.LayerNorm", 1e-12);
    y = b.gelu(b.linear(x, spec.ffn, name + ".intermediate", 0.02));
    y = b.dropout(b.linear(y, spec.hidden, name + ".output", 0.02), spec.dropout);
    x = b.layer_norm(b.add(x, y), name + ".output.LayerNorm", 1e-12);
  }
  x = b.gelu(b.linear(x, spec.hidden, "cls.transform", 0.02));
  x = b.layer_norm(x, "cls.LayerNorm", 1e-12);
  const ValueId logits = b.matmul(x, b.transpose(table, {1, 0}));
  b.output(b.add(logits, b.filled("cls.bias", {spec.vocab}, 0)), "logits");
  return std::move(b.graph());
}

const RegisterModel kBert{{
    .name = "bert",
    .defaults = {.layers = 12,
                 .hidden = 768,
                 .heads = 12,
                 .ffn = 3072,
                 .vocab = 30522,
                 .seq = 512,
                 .dropout = 0},
    .sizes = {{"bert-base", {.layers = 12, .hidden = 768, .heads = 12}},
              {"bert-large", {.layers = 24, .hidden = 1024, .heads = 16}}},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
