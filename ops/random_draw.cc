// A tensor is walked in runs that are contiguous both here and in the unsharded sample. A run is
// cut into pieces; each piece draws Philox blocks of four words, kLanes blocks at a time so that
// the rounds vectorise.
#include "ops/random_draw.h"

#include <algorithm>
#include <cstring>

#include "graph/passes/sample_rows.h"
#include "graph/random.h"

namespace trainrt {

namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kPiece = 1024;

// Words 4 * first_block ... of kLanes consecutive blocks.
void philox_lanes(uint64_t key, uint64_t first_block, uint64_t sample, uint32_t* words) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    const uint64_t counter = first_block + static_cast<uint64_t>(i);
    c0[i] = static_cast<uint32_t>(counter);
    c1[i] = static_cast<uint32_t>(counter >> 32);
    c2[i] = static_cast<uint32_t>(sample);
    c3[i] = static_cast<uint32_t>(sample >> 32);
  }
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
#pragma omp simd
    for (int64_t i = 0; i < kLanes; ++i) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * c0[i];
      const uint64_t p1 = uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<uint32_t>(p1);
      c2[i] = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int64_t i = 0; i < kLanes; ++i) {
    words[4 * i] = c0[i];
    words[4 * i + 1] = c1[i];
    words[4 * i + 2] = c2[i];
    words[4 * i + 3] = c3[i];
  }
}

RandomLayout layout_of(const KernelContext& op, const Shape& shape) {
  const Attributes& attributes = op.attributes();
  RandomLayout layout;
  layout.shape = shape;
  const int ndim = static_cast<int>(shape.size());
  layout.offsets = attributes.get_ints("offsets", Shape(shape.size(), 0));
  Shape sample = attributes.get_ints("full_shape", shape);
  const Shape full = sample;
  const int64_t axis = attributes.get_int(sample_rows::kBatchAxis, -1);
  layout.batch_axis = axis < ndim ? static_cast<int>(axis) : -1;
  if (layout.batch_axis >= 0) {
    int64_t& extent = sample[static_cast<size_t>(layout.batch_axis)];
    layout.rows = attributes.get_int(sample_rows::kRowsPerSample, 1);
    layout.sample_stride = attributes.get_int(sample_rows::kSampleStride, layout.rows);
    layout.num_samples = extent / layout.rows;
    extent = layout.rows;
  }
  layout.sample_strides = row_major_strides(sample);
  for (int d = ndim - 1; d >= 0 && d != layout.batch_axis; --d) {
    ++layout.run_dims;
    layout.run *= shape[static_cast<size_t>(d)];
    if (shape[static_cast<size_t>(d)] != full[static_cast<size_t>(d)]) {
      break;
    }
  }
  return layout;
}

// The sample and the first element of run number `index`.
void locate_run(const RandomLayout& layout, int64_t index, int64_t& sample, int64_t& element) {
  sample = 0;
  element = 0;
  const int ndim = static_cast<int>(layout.shape.size());
  for (int d = ndim - 1; d >= 0; --d) {
    const size_t i = static_cast<size_t>(d);
    int64_t position = layout.offsets[i];
    if (d < ndim - layout.run_dims) {
      position += index % layout.shape[i];
      index /= layout.shape[i];
    }
    if (d == layout.batch_axis) {
      // The axis is (rows before the samples) x samples x (sample_stride rows).
      const int64_t stride = layout.sample_stride;
      sample = position / stride % layout.num_samples;
      position = position / (stride * layout.num_samples) * stride + position % stride;
    }
    element += position * layout.sample_strides[i];
  }
}

}  // namespace

void set_random_stream(Attributes& attributes, const std::string& node_name, double onnx_seed) {
  uint64_t stream = hash_name(node_name);
  if (onnx_seed != 0) {
    uint64_t bits;
    std::memcpy(&bits, &onnx_seed, sizeof(bits));
    stream = mix_keys(stream, bits);
  }
  attributes.set("rng_stream", static_cast<int64_t>(stream));
}

DrawSource draw_source(const KernelContext& op, const Shape& shape) {
  DrawSource source;
  source.layout = layout_of(op, shape);
  const uint64_t stream = static_cast<uint64_t>(op.attributes().get_int("rng_stream", 0));
  source.key = mix_keys(mix_keys(op.step().seed, op.step().step), stream);
  source.first_sample = source.layout.batch_axis >= 0 ? op.step().first_sample : 0;
  return source;
}

RandomRows::RandomRows(const KernelContext& op, const Shape& shape)
    : source_(draw_source(op, shape)) {
  source_.layout.run_dims = 1;
  source_.layout.run = shape.back();
}

const uint32_t* RandomRows::draw(int64_t row, int64_t n, uint32_t* words) const {
  int64_t sample, element;
  locate_run(source_.layout, row, sample, element);
  for (int64_t w = 0; w < element % 4 + n; w += 4 * kLanes) {
    philox_lanes(source_.key,
                 static_cast<uint64_t>(element / 4 + w / 4),
                 source_.first_sample + static_cast<uint64_t>(sample),
                 words + w);
  }
  return words + element % 4;
}

void draw_words(KernelContext& op,
                const Shape& shape,
                const std::function<void(int64_t, const uint32_t*, int64_t)>& fn) {
  const RandomLayout layout = layout_of(op, shape);
  const uint64_t stream = static_cast<uint64_t>(op.attributes().get_int("rng_stream"));
  const uint64_t key = mix_keys(mix_keys(op.step().seed, op.step().step), stream);
  const uint64_t first_sample = layout.batch_axis >= 0 ? op.step().first_sample : 0;
  const int64_t pieces = (layout.run + kPiece - 1) / kPiece;
  const int64_t num_runs = layout.run == 0 ? 0 : num_elements(shape) / layout.run;
  const int64_t grain = std::max<int64_t>(1, 16384 / std::min(kPiece, layout.run + 1));
  op.parallel_for(num_runs * pieces, grain, [&](int64_t begin, int64_t end) {
    uint32_t words[kPiece + 4 * kLanes + 4];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t skip = i % pieces * kPiece;
      const int64_t n = std::min(kPiece, layout.run - skip);
      int64_t sample, element;
      locate_run(layout, i / pieces, sample, element);
      element += skip;
      const int64_t first_block = element / 4;
      const int64_t num_words = element % 4 + n;
      for (int64_t w = 0; w < num_words; w += 4 * kLanes) {
        philox_lanes(key,
                     static_cast<uint64_t>(first_block + w / 4),
                     first_sample + static_cast<uint64_t>(sample),
                     words + w);
      }
      fn(i / pieces * layout.run + skip, words + element % 4, n);
    }
  });
}

Attributes localize_random(const OpContext& op, const FactorShard& shard) {
  const ShardingRule rule = get_op(op.node().op_type).sharding(op);
  Attributes attributes = op.attributes();
  Shape offsets = attributes.get_ints("offsets", Shape(op.output_shape(0).size(), 0));
  const Shape full = attributes.get_ints("full_shape", op.output_shape(0));
  for (size_t d = 0; d < rule.outputs[0].size(); ++d) {
    if (rule.outputs[0][d] == DimFactors{shard.factor}) {
      offsets[d] += shard.offset;
      if (attributes.has("shape")) {
        Shape shape = attributes.get_ints("shape");
        shape[d] = shard.size;
        attributes.set("shape", shape);
      }
    }
  }
  attributes.set("offsets", offsets);
  attributes.set("full_shape", full);
  return attributes;
}

}  // namespace trainrt
