// A small causal language model whose sequence dim is symbolic, as ONNX text, and padded data for
// it.
#pragma once

#include <string>

namespace trainrt::testing {

inline constexpr int kSequenceWidth = 16;  // tokens of a padded sample

// tokens int64[N, S] -> logits float[N, S, 11]: embeddings, learned positions, one causal
// attention.
std::string sequence_model();

// Writes an .npz with "tokens" and "labels" (the next token, -100 past the end) of `num_samples`
// sequences with a long tail of lengths, "attention_mask" and "lengths".
void write_sequences(const std::string& path, int num_samples);

}  // namespace trainrt::testing
