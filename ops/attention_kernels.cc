// The probabilities of a block of kBlock queries against all keys they see exist at a time, in the
// workspace: kBlock rows instead of heads * queries rows. The gradient makes them again from q, k
// and the saved log of the row sums (as FlashAttention does; Dao et al., 2022). Keys after the last
// visible one of a block are never touched, so a causal mask halves the work. Rows of scores end in
// whole vectors: keys that a query must not see have score -inf there, hence probability 0.
//
// Work is cut by head (of k and v, in the backward pass: their gradients sum over the queries'
// heads that share them), and in the forward pass by kChunk queries; every unit is computed alone,
// so the number of units per task, which follows the number of threads to bound the workspace, does
// not change a bit. Tensors of 16-bit floats are converted head by head and computed in float.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/attention.h"
#include "ops/attention_scratch.h"
#include "ops/gemm_tile.h"
#include "ops/random_draw.h"
#include "ops/rows.h"
#include "ops/vector_math.h"

namespace trainrt::attention {

namespace {

constexpr int64_t kBlock = 32;
constexpr int64_t kChunk = 256;
constexpr int64_t kSumBlock = 512;  // terms summed in the narrow type

// Units of work per task and number of tasks, each with scratch of its own.
struct Cut {
  int64_t grain = 1, tasks = 1;
};

Cut cut(int64_t units, int threads) {
  Cut result;
  result.grain = std::max<int64_t>(1, (units + 4 * threads - 1) / (4 * threads));
  result.tasks = (units + result.grain - 1) / result.grain;
  return result;
}

int64_t num_chunks(const Problem& p) {
  return (p.sq + kChunk - 1) / kChunk;
}

// Units of the backward pass: what sums into one place stays together.
struct Units {
  Units(const Problem& p, bool mask_grad)
      : samples(mask_grad && !p.mask_varies_by_sample() ? 1 : p.samples),
        heads(mask_grad && !p.mask_varies_by_head() ? 1 : p.kv_heads) {}
  int64_t count() const { return samples * heads; }
  int64_t samples, heads;
};

template <typename C>
int64_t whole_vectors(int64_t n) {
  return (n + kVector<C> - 1) / kVector<C> * kVector<C>;
}

template <typename C>
int64_t padded_keys(const Problem& p) {
  const int64_t width = 2 * kVector<C>;
  return (p.sk + width - 1) / width * width;
}

// The arrays of one task, one after the other; a null base only counts bytes. T: the tensors' type,
// C: that of the arithmetic. Copies exist only where the two differ.
template <typename T, typename C>
struct Scratch {
  Scratch(const Problem& p, std::byte* base, bool backward)
      : next_(reinterpret_cast<uintptr_t>(base)) {
    constexpr bool kCopies = !std::is_same_v<T, C>;
    keys = take<C>(packed_size<C>(p.sk, p.d));
    scores = take<C>(kBlock * padded_keys<C>(p));
    if (p.ratio > 0) {
      words = take<uint32_t>(RandomRows::words_for(p.sk));
    }
    if (backward) {
      values = take<C>(packed_size<C>(p.sk, p.e));
      grads = take<C>(kBlock * padded_keys<C>(p));
      dropped = p.ratio > 0 ? take<C>(kBlock * padded_keys<C>(p)) : scores;
    }
    if (kCopies) {
      q = take<C>(kBlock * p.d);
      v = take<C>(p.sk * p.e);
      y = take<C>(kBlock * p.e);
      if (backward) {
        k = take<C>(p.sk * p.d);
        dy = take<C>(kBlock * p.e);
        dq = take<C>(kBlock * p.d);
        dk = take<C>(p.sk * p.d);
        dv = take<C>(p.sk * p.e);
      }
    }
  }
  C *keys = nullptr, *scores = nullptr, *values = nullptr, *grads = nullptr, *dropped = nullptr;
  C *q = nullptr, *k = nullptr, *v = nullptr, *y = nullptr, *dy = nullptr;
  C *dq = nullptr, *dk = nullptr, *dv = nullptr;
  uint32_t* words = nullptr;
  int64_t bytes = 0;

 private:
  template <typename U>
  U* take(int64_t count) {
    U* array = reinterpret_cast<U*>(next_ + static_cast<uintptr_t>(bytes));
    bytes += (count * static_cast<int64_t>(sizeof(U)) + 63) / 64 * 64;
    return array;
  }
  uintptr_t next_;
};

// Rows of one head, `stride` elements apart.
template <typename C>
struct Rows {
  C* data = nullptr;
  int64_t stride = 0;
};

// `count` rows of a tensor for reading, converted into `copy` where the types differ.
template <typename C, typename T>
Rows<const C> read_rows(const T* from, int64_t stride, int64_t count, int64_t width, C* copy) {
  if constexpr (std::is_same_v<T, C>) {
    return {from, stride};
  } else {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        copy[i * width + j] = load<C>(from[i * stride + j]);
      }
    }
    return {copy, width};
  }
}

// The same for writing; write_back() then brings the copy home.
template <typename C, typename T>
Rows<C> rows_to_write(T* to, int64_t stride, int64_t width, C* copy) {
  if constexpr (std::is_same_v<T, C>) {
    return {to, stride};
  } else {
    return {copy, width};
  }
}

template <typename C, typename T>
void write_back(Rows<C> rows, T* to, int64_t stride, int64_t count, int64_t width) {
  if constexpr (!std::is_same_v<T, C>) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < width; ++j) {
        to[i * stride + j] = store<T>(rows.data[i * rows.stride + j]);
      }
    }
  }
}

template <typename C>
void clear_rows(Rows<C> rows, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    std::fill_n(rows.data + i * rows.stride, width, C(0));
  }
}

// Scales and masks one row of scores, -inf from `visible` to the end of the vector.
template <typename C>
void finish_scores(
    const Problem& p, const C* mask, int64_t index, int64_t i, C* row, int64_t visible) {
  const C scale = static_cast<C>(p.scale);
  const int64_t end = whole_vectors<C>(visible);
#pragma omp simd
  for (int64_t j = 0; j < end; ++j) {
    row[j] *= scale;
  }
  if (mask != nullptr) {
    const C* mask_row = mask + p.mask_offset(index, i);
    if (p.mask_strides.back() == 1) {
#pragma omp simd
      for (int64_t j = 0; j < visible; ++j) {
        row[j] += mask_row[j];
      }
    } else {  // a constant for the row
      const C value = mask_row[0];
#pragma omp simd
      for (int64_t j = 0; j < end; ++j) {
        row[j] += value;
      }
    }
  }
  std::fill(row + visible, row + end, -std::numeric_limits<C>::infinity());
}

// out = in where kept, scaled, else 0.
template <typename C>
void drop_row(const Problem& p,
              const RandomRows& random,
              int64_t row,
              const C* in,
              C* out,
              int64_t n,
              uint32_t* words) {
  const uint32_t limit = drop_limit(p.ratio);
  const C scale = p.ratio < 1 ? static_cast<C>(1 / (1 - p.ratio)) : C(0);
  const uint32_t* draws = random.draw(row, n, words);
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    out[j] = draws[j] >= limit ? in[j] * scale : C(0);
  }
}

// row = exp(row - max); returns the sum. `n` is a whole number of vectors.
template <typename C>
double exponentials(C* row, int64_t n, C max) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kSumBlock) {
    const int64_t end = std::min(n, begin + kSumBlock);
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) {
      row[j] = vmath::exp_nonpositive(row[j] - max);
    }
    total += static_cast<double>(vector_sum(row + begin, end - begin));
  }
  return total;
}

// y and lse of queries [begin, end), at most kBlock of them; `index` is sample * heads + head.
template <typename T, typename C>
void forward_block(KernelContext& op,
                   const Problem& p,
                   int64_t index,
                   int64_t begin,
                   int64_t end,
                   Rows<const C> v,
                   const RandomRows* random,
                   const Scratch<T, C>& scratch) {
  const int64_t ld = padded_keys<C>(p), n = p.visible(end - 1), rows = end - begin;
  const int64_t sample = index / p.heads, head = index % p.heads;
  const T* q_rows = op.input<T>(0) + p.q.offset(sample, head) + begin * p.q.row;
  const Rows<const C> q = read_rows(q_rows, p.q.row, rows, p.d, scratch.q);
  gemm_packed<C>({q.data, q.stride, 1}, scratch.keys, scratch.scores, ld, rows, n, p.d);
  C* lse = op.output<C>(1);
  C factor[kBlock];
  for (int64_t i = begin; i < end; ++i) {
    C* row = scratch.scores + (i - begin) * ld;
    const int64_t visible = p.visible(i), whole = whole_vectors<C>(visible);
    finish_scores(p, op.input<C>(kMaskInput), index, i, row, visible);
    const C max = vector_max(row, whole);
    const double sum = exponentials(row, whole, max);
    std::fill(row + whole, row + whole_vectors<C>(n), C(0));
    factor[i - begin] = static_cast<C>(1 / sum);
    if (lse != nullptr) {
      lse[index * p.sq + i] = static_cast<C>(static_cast<double>(max) + std::log(sum));
    }
    if (random != nullptr) {
      drop_row(p, *random, index * p.sq + i, row, row, visible, scratch.words);
    }
  }
  T* y_rows = op.output<T>(0) + p.y.offset(sample, head) + begin * p.y.row;
  const Rows<C> y = rows_to_write(y_rows, p.y.row, p.e, scratch.y);
  gemm_small<C>({scratch.scores, ld, 1}, v.data, v.stride, y.data, y.stride, rows, p.e, n, false);
  for (int64_t i = 0; i < rows; ++i) {
    C* to = y.data + i * y.stride;
#pragma omp simd
    for (int64_t j = 0; j < p.e; ++j) {
      to[j] *= factor[i];
    }
  }
  write_back(y, y_rows, p.y.row, rows, p.e);
}

template <typename T, typename C>
void forward(KernelContext& op) {
  const Problem p = problem_of(op);
  if (p.sk == 0) {
    forward_reference(op);  // no block of keys comes that would write the outputs
    return;
  }
  const int64_t units = p.samples * p.heads * num_chunks(p);
  const Cut work = cut(units, op.device().spec().threads);
  const int64_t bytes = Scratch<T, C>(p, nullptr, false).bytes;
  const RandomRows random_rows(op, p.probabilities);
  const RandomRows* random = p.ratio > 0 ? &random_rows : nullptr;
  op.parallel_for(units, work.grain, [&](int64_t first, int64_t last) {
    const Scratch<T, C> scratch(p, op.workspace().data() + first / work.grain * bytes, false);
    int64_t ready = -1;  // the head of k and v that lies in the scratch
    Rows<const C> v;
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t index = unit / num_chunks(p), chunk = unit % num_chunks(p) * kChunk;
      const int64_t sample = index / p.heads, kv_head = index % p.heads / p.group();
      if (ready != sample * p.kv_heads + kv_head) {
        ready = sample * p.kv_heads + kv_head;
        const T* k = op.input<T>(1) + p.k.offset(sample, kv_head);
        pack_transposed(k, p.k.row, p.sk, p.d, scratch.keys);
        v = read_rows(op.input<T>(2) + p.v.offset(sample, kv_head), p.v.row, p.sk, p.e, scratch.v);
      }
      const int64_t chunk_end = std::min(p.sq, chunk + kChunk);
      for (int64_t i = chunk; i < chunk_end; i += kBlock) {
        forward_block(op, p, index, i, std::min(chunk_end, i + kBlock), v, random, scratch);
      }
    }
  });
}

// Where the gradients of one head of k and v are summed; absent ones are null.
template <typename C>
struct KeyGradients {
  Rows<const C> k;
  Rows<C> dk, dv;
  C* dmask = nullptr;  // of the whole mask
};

// Probabilities to scratch.scores, after dropout to scratch.dropped, and the gradients of the
// unscaled scores to scratch.grads, for queries [begin, end).
template <typename T, typename C>
void score_gradients(KernelContext& op,
                     const Problem& p,
                     int64_t index,
                     int64_t begin,
                     int64_t end,
                     const RandomRows* random,
                     const Scratch<T, C>& scratch) {
  const int64_t ld = padded_keys<C>(p), n = p.visible(end - 1);
  const C* lse = op.input<C>(5) + index * p.sq;
  const C* dlse = op.input<C>(7);
  for (int64_t i = begin; i < end; ++i) {
    C* row = scratch.scores + (i - begin) * ld;
    C* grad = scratch.grads + (i - begin) * ld;
    C* dropped = scratch.dropped + (i - begin) * ld;
    const int64_t visible = p.visible(i), whole = whole_vectors<C>(visible);
    finish_scores(p, op.input<C>(kMaskInput), index, i, row, visible);
    const double sum = exponentials(row, whole, lse[i]);
    if (p.has_mask) {
      const C factor = static_cast<C>(1 / sum);
#pragma omp simd
      for (int64_t j = 0; j < whole; ++j) {
        row[j] *= factor;
      }
    }
    if (random != nullptr) {
      const int64_t draw = index * p.sq + i;
      drop_row(p, *random, draw, row, dropped, visible, scratch.words);
      drop_row(p, *random, draw, grad, grad, visible, scratch.words);
      std::fill(dropped + visible, dropped + whole_vectors<C>(n), C(0));
    }
    // The sum of y dy, found in the scores: y itself would come from memory.
    C along = vector_dot(row, grad, whole);
    if (dlse != nullptr) {  // d lse / d score is the probability
      along -= dlse[index * p.sq + i];
    }
#pragma omp simd
    for (int64_t j = 0; j < whole; ++j) {
      grad[j] = row[j] * (grad[j] - along);
    }
    std::fill(row + whole, row + whole_vectors<C>(n), C(0));
    std::fill(grad + whole, grad + whole_vectors<C>(n), C(0));
  }
}

// Adds a block's score gradients to the mask's.
template <typename C>
void add_mask_gradient(const Problem& p,
                       int64_t index,
                       int64_t begin,
                       int64_t end,
                       const C* grads,
                       int64_t ld,
                       C* dmask) {
  for (int64_t i = begin; i < end; ++i) {
    const C* grad = grads + (i - begin) * ld;
    C* to = dmask + p.mask_offset(index, i);
    const int64_t visible = p.visible(i);
    if (p.mask_strides.back() == 1) {
#pragma omp simd
      for (int64_t j = 0; j < visible; ++j) {
        to[j] += grad[j];
      }
    } else {
      C sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t j = 0; j < visible; ++j) {
        sum += grad[j];
      }
      *to += sum;
    }
  }
}

// What queries [begin, end) of one head contribute.
template <typename T, typename C>
void backward_block(KernelContext& op,
                    const Problem& p,
                    int64_t index,
                    int64_t begin,
                    int64_t end,
                    const KeyGradients<C>& keys,
                    const RandomRows* random,
                    const Scratch<T, C>& scratch) {
  const int64_t ld = padded_keys<C>(p), n = p.visible(end - 1), rows = end - begin;
  const int64_t sample = index / p.heads, head = index % p.heads;
  const int64_t q_at = p.q.offset(sample, head) + begin * p.q.row;
  const int64_t y_at = p.y.offset(sample, head) + begin * p.y.row;
  const Rows<const C> q = read_rows(op.input<T>(0) + q_at, p.q.row, rows, p.d, scratch.q);
  const Rows<const C> dy = read_rows(op.input<T>(6) + y_at, p.y.row, rows, p.e, scratch.dy);
  gemm_packed<C>({q.data, q.stride, 1}, scratch.keys, scratch.scores, ld, rows, n, p.d);
  gemm_packed<C>({dy.data, dy.stride, 1}, scratch.values, scratch.grads, ld, rows, n, p.e);
  score_gradients(op, p, index, begin, end, random, scratch);
  if (keys.dmask != nullptr) {
    add_mask_gradient(p, index, begin, end, scratch.grads, ld, keys.dmask);
  }
  const C scale = static_cast<C>(p.scale);
  for (int64_t i = 0; i < rows; ++i) {
    C* grad = scratch.grads + i * ld;
#pragma omp simd
    for (int64_t j = 0; j < whole_vectors<C>(n); ++j) {
      grad[j] *= scale;
    }
  }
  if (op.has_output(0)) {
    T* to = op.output<T>(0) + q_at;
    const Rows<C> dq = rows_to_write(to, p.q.row, p.d, scratch.dq);
    gemm_small<C>({scratch.grads, ld, 1},
                  keys.k.data,
                  keys.k.stride,
                  dq.data,
                  dq.stride,
                  rows,
                  p.d,
                  n,
                  false);
    write_back(dq, to, p.q.row, rows, p.d);
  }
  if (keys.dk.data != nullptr) {
    gemm_small<C>(
        {scratch.grads, 1, ld}, q.data, q.stride, keys.dk.data, keys.dk.stride, n, p.d, rows, true);
  }
  if (keys.dv.data != nullptr) {
    gemm_small<C>({scratch.dropped, 1, ld},
                  dy.data,
                  dy.stride,
                  keys.dv.data,
                  keys.dv.stride,
                  n,
                  p.e,
                  rows,
                  true);
  }
}

// Gradients of one head of k and v, and of the queries that read it.
template <typename T, typename C>
void backward_head(KernelContext& op,
                   const Problem& p,
                   int64_t sample,
                   int64_t kv_head,
                   C* dmask,
                   const RandomRows* random,
                   const Scratch<T, C>& scratch) {
  const int64_t k_at = p.k.offset(sample, kv_head), v_at = p.v.offset(sample, kv_head);
  const T* k = op.input<T>(1) + k_at;
  pack_transposed(k, p.k.row, p.sk, p.d, scratch.keys);
  pack_transposed(op.input<T>(2) + v_at, p.v.row, p.sk, p.e, scratch.values);
  KeyGradients<C> keys;
  keys.k = read_rows(k, p.k.row, p.sk, p.d, scratch.k);
  keys.dmask = dmask;
  T* dk = op.has_output(1) ? op.output<T>(1) + k_at : nullptr;
  T* dv = op.has_output(2) ? op.output<T>(2) + v_at : nullptr;
  if (dk != nullptr) {
    keys.dk = rows_to_write(dk, p.k.row, p.d, scratch.dk);
    clear_rows(keys.dk, p.sk, p.d);
  }
  if (dv != nullptr) {
    keys.dv = rows_to_write(dv, p.v.row, p.e, scratch.dv);
    clear_rows(keys.dv, p.sk, p.e);
  }
  for (int64_t g = 0; g < p.group(); ++g) {
    const int64_t index = sample * p.heads + kv_head * p.group() + g;
    for (int64_t i = 0; i < p.sq; i += kBlock) {
      backward_block(op, p, index, i, std::min(p.sq, i + kBlock), keys, random, scratch);
    }
  }
  if (dk != nullptr) {
    write_back(keys.dk, dk, p.k.row, p.sk, p.d);
  }
  if (dv != nullptr) {
    write_back(keys.dv, dv, p.v.row, p.sk, p.e);
  }
}

template <typename T, typename C>
void backward(KernelContext& op) {
  const Problem p = problem_of(op);
  C* const dmask = op.output<C>(kMaskInput);
  const Units units(p, dmask != nullptr);
  const Cut work = cut(units.count(), op.device().spec().threads);
  const int64_t bytes = Scratch<T, C>(p, nullptr, true).bytes;
  if (dmask != nullptr) {
    std::fill_n(dmask, num_elements(op.output_shape(kMaskInput)), C(0));
  }
  const RandomRows random_rows(op, p.probabilities);
  const RandomRows* random = p.ratio > 0 ? &random_rows : nullptr;
  op.parallel_for(units.count(), work.grain, [&](int64_t first, int64_t last) {
    const Scratch<T, C> scratch(p, op.workspace().data() + first / work.grain * bytes, true);
    for (int64_t unit = first; unit < last; ++unit) {
      for (int64_t s = unit / units.heads; s < p.samples; s += units.samples) {
        for (int64_t h = unit % units.heads; h < p.kv_heads; h += units.heads) {
          backward_head(op, p, s, h, dmask, random, scratch);
        }
      }
    }
  });
}

}  // namespace

int64_t forward_workspace(const OpContext& op, const DeviceSpec& spec) {
  const Problem p = problem_of(op);
  if (spec.backend == Backend::kCuda) {
    return CudaScratch(op, p, spec).total();
  }
  const int64_t tasks = cut(p.samples * p.heads * num_chunks(p), spec.threads).tasks;
  return dispatch_real(op.input_dtype(0), [&](auto tag) {
    return tasks * Scratch<decltype(tag), Compute<decltype(tag)>>(p, nullptr, false).bytes;
  });
}

int64_t backward_workspace(const OpContext& op, const DeviceSpec& spec) {
  const Problem p = problem_of(op);
  if (spec.backend == Backend::kCuda) {
    return CudaScratch(op, p, spec).total();
  }
  const int64_t tasks = cut(Units(p, op.has_output(kMaskInput)).count(), spec.threads).tasks;
  return dispatch_real(op.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    return tasks * Scratch<T, Compute<T>>(p, nullptr, true).bytes;
  });
}

void forward_fast(KernelContext& op) {
  dispatch_real(op.input_dtype(0),
                [&](auto tag) { forward<decltype(tag), Compute<decltype(tag)>>(op); });
}

void backward_fast(KernelContext& op) {
  dispatch_real(op.input_dtype(0),
                [&](auto tag) { backward<decltype(tag), Compute<decltype(tag)>>(op); });
}

}  // namespace trainrt::attention
