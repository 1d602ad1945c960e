// Draws of the random operators. The draw for an element is a function of (seed, step, stream of
// the node, global sample, index of the element within the unsharded sample) and of nothing else:
// micro-batches, ranks, threads and recompute cannot change it.
//
// Attributes: `rng_stream`; where the samples lie (graph/passes/sample_rows.h); on a shard also
// `offsets` and `full_shape`, written by localize_random.
#pragma once

#include <functional>

#include "graph/op_def.h"

namespace trainrt {

// Sets `rng_stream` from the node's stable name and ONNX's optional seed.
void set_random_stream(Attributes& attributes, const std::string& node_name, double onnx_seed);

// Calls fn(begin, words, n): `words` are 4-byte uniform draws of the elements [begin, begin + n) of
// the tensor of this shape. In parallel.
void draw_words(KernelContext& op,
                const Shape& shape,
                const std::function<void(int64_t begin, const uint32_t* words, int64_t n)>& fn);

// Where a tensor lies in the samples.
struct RandomLayout {
  Shape shape;           // of this shard
  Shape offsets;         // of this shard in the whole tensor
  Shape sample_strides;  // of the whole tensor, the batch axis counting rows of one sample
  int batch_axis = -1;
  int64_t rows = 1;           // of a sample along the batch axis
  int64_t sample_stride = 1;  // rows from one sample to the next
  int64_t num_samples = 1;
  int run_dims = 0;  // the last dims that form a contiguous run
  int64_t run = 1;
};

// Where the draws of a tensor come from: everything that a kernel needs to make any of them.
struct DrawSource {
  RandomLayout layout;
  uint64_t key = 0, first_sample = 0;
};
DrawSource draw_source(const KernelContext& op, const Shape& shape);

// The same draws row by row (last dim), for kernels that make their tensor piece by piece.
class RandomRows {
 public:
  RandomRows(const KernelContext& op, const Shape& shape);
  // The room that draw() needs in `words` for the longest row.
  static int64_t words_for(int64_t length) { return length + 128; }
  // Draws elements [0, n) of a row; returns where they begin within `words`.
  const uint32_t* draw(int64_t row, int64_t n, uint32_t* words) const;

 private:
  DrawSource source_;
};

// LocalizeFn of a random operator whose dims are those of output 0, one factor each.
Attributes localize_random(const OpContext& op, const FactorShard& shard);

}  // namespace trainrt
