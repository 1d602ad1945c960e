// --max-tokens: the samples of a step, sorted by length into micro-batches of at most so many
// tokens with their padding, and dealt out to the data ranks by tokens.
//
// A step has the samples that it would have without. Which of them run together is a pure function
// of the step's samples, their lengths and the ranks' weights, so all ranks and a resumed run
// agree.
#pragma once

#include <cstdint>
#include <vector>

#include "parallel/program.h"
#include "runtime/token_lengths.h"

namespace trainrt {

class TokenBatches {
 public:
  // Throws kInvalidArgument when one sample has more tokens than a micro-batch may have.
  TokenBatches(TokenLengths lengths, int64_t num_samples, int64_t max_tokens, int64_t batch_size);

  // Everything that a micro-batch can be; MicroBatch::variant is an index into it. Largest first.
  const std::vector<MicroBatchShape>& shapes() const { return shapes_; }
  // Most samples of the longest kind that run together.
  int64_t largest_micro_batch() const { return most_samples_.back(); }
  const TokenLengths& lengths() const { return lengths_; }
  // To which samples are padded, ascending.
  const std::vector<int64_t>& buckets() const { return buckets_; }

  // Puts the step's `samples` (numbers in the dataset) in the order in which micro-batches hold
  // them, and gives each data rank some, in that order. `weights`: the ranks' parts of the work, by
  // proportion; one per data rank.
  std::vector<std::vector<MicroBatch>> deal(std::vector<int64_t>& samples,
                                            const std::vector<double>& weights) const;

 private:
  size_t bucket_of(int64_t length) const;
  MicroBatch micro_batch(size_t bucket, int64_t first_sample, int64_t num_samples) const;

  TokenLengths lengths_;
  std::vector<int64_t> buckets_;
  std::vector<int64_t> most_samples_;  // by bucket, a power of two
  std::vector<MicroBatchShape> shapes_;
};

// At most `count` lengths to pad to, the last the largest of `lengths`, with the least padding in
// all. Ascending.
std::vector<int64_t> choose_buckets(const std::vector<int32_t>& lengths, size_t count);

// Tokens of a micro-batch, padding included; `width` stands for a length of 0.
int64_t padded_tokens(const MicroBatch& micro_batch, int64_t width);

}  // namespace trainrt
