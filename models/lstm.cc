// A recurrent language model: embedding, a stack of LSTM layers (Hochreiter & Schmidhuber 1997), a
// linear head over the vocabulary.
#include <cmath>

#include "models/onnx_builder.h"

namespace trainrt {

namespace {

Graph build(const ModelSpec& spec, int64_t batch) {
  const int64_t h = spec.hidden;
  OnnxBuilder b(spec.seed);
  const ValueId ids = b.input("input_ids", DType::kInt64, {batch, spec.seq});
  ValueId x = b.embedding(ids, spec.vocab, h, "embedding", 0.1);
  x = b.transpose(x, {1, 0, 2});  // ONNX's recurrent operators want [seq, batch, width]
  const double bound = 1 / std::sqrt(static_cast<double>(h));
  const ValueId direction = b.constant(Tensor::from(std::vector<int64_t>{1}, {1}));
  for (int64_t i = 0; i < spec.layers; ++i) {
    const std::string name = "lstm." + std::to_string(i);
    const ValueId weight = b.uniform(name + ".weight_ih", {1, 4 * h, h}, bound);
    const ValueId recurrent = b.uniform(name + ".weight_hh", {1, 4 * h, h}, bound);
    const ValueId bias = b.uniform(name + ".bias", {1, 8 * h}, bound);
    const ValueId y = b.op(
        "LSTM", {x, weight, recurrent, bias}, {spec.seq, 1, batch, h}, {{"hidden_size", h}}, name);
    x = b.op("Squeeze", {y, direction}, {spec.seq, batch, h});
    x = b.dropout(x, i + 1 < spec.layers ? spec.dropout : 0);
  }
  x = b.transpose(x, {1, 0, 2});
  b.output(b.linear(x, spec.vocab, "head", bound), "logits");
  return std::move(b.graph());
}

const RegisterModel kLstm{{
    .name = "lstm",
    .defaults = {.layers = 2, .hidden = 256, .vocab = 128, .seq = 128, .dropout = 0},
    .sizes = {},
    .build = build,
}};

}  // namespace

}  // namespace trainrt
