// How many tokens each sample has, and where a sample may be cut: what --max-tokens works with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/onnx_import.h"
#include "runtime/data_choice.h"

namespace trainrt {

struct TokenLengths {
  std::string symbol;              // the model's sequence dim; empty when its size is fixed
  int64_t width = 0;               // tokens of a sample with its padding
  std::vector<int32_t> of_sample;  // by number in the dataset; empty: all have `width`
  std::string from;                // what says so, for messages

  int64_t at(int64_t sample) const {
    return of_sample.empty() ? width : of_sample[static_cast<size_t>(sample)];
  }
};

// `forward` is bound to the width. Lengths are, in this order: those of an integer array `lengths`
// with one number per sample; the last place that is not 0 of an array `attention_mask`; the last
// label that is not ignored. Tokens beyond are padding. Throws kInvalidArgument when there is no
// sequence, when the data pad but the model's dim is fixed, and when the loss would count padding.
TokenLengths find_token_lengths(const OnnxModel& model,
                                const Graph& forward,
                                const DataChoice& choice);

// The axis of a sample of `binding` that enumerates tokens; -1 when none does.
int token_axis(const TokenLengths& lengths, const OnnxModel& model, const InputBinding& binding);

}  // namespace trainrt
