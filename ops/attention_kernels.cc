// The probabilities of a block of kBlock queries against all keys they see exist at a time, in the
// workspace: 64 rows instead of heads * queries rows. The gradient makes them again from q, k and
// the saved log of the row sums (as FlashAttention does; Dao et al., 2022). Keys after the last
// visible one of a block are never touched, so a causal mask halves the work.
//
// Work is cut by head, and in the forward pass by kChunk queries; every unit is computed alone, so
// the number of units per task, which follows the number of threads to bound the workspace, does
// not change a bit.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/attention.h"
#include "ops/gemm_tile.h"
#include "ops/random_draw.h"
#include "ops/rows.h"
#include "ops/vector_math.h"

namespace trainrt::attention {

namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kChunk = 256;

template <typename Context>
Problem make_problem(const Context& op) {
  Problem p;
  const Shape &q = op.input_shape(0), &k = op.input_shape(1), &v = op.input_shape(2);
  const int ndim = static_cast<int>(q.size());
  p.heads = dims_product(q, 0, ndim - 2);
  p.sq = q[q.size() - 2];
  p.d = q.back();
  p.sk = k[k.size() - 2];
  p.e = v.back();
  const Attributes& attributes = op.attributes();
  p.scale = attributes.get_float("scale", 1);
  p.causal = attributes.get_int("causal", 0) != 0;
  p.ratio = attributes.get_float("ratio", 0);
  p.probabilities = q;
  p.probabilities.back() = p.sk;
  p.has_mask = op.has_input(kMaskInput);
  if (p.has_mask) {
    p.mask_strides = broadcast_strides(op.input_shape(kMaskInput), p.probabilities);
  }
  return p;
}

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

template <typename T>
int64_t padded_keys(const Problem& p) {
  const int64_t width = 2 * kVector<T>;
  return (p.sk + width - 1) / width * width;
}

// The arrays of one task, one after the other; a null base only counts bytes.
template <typename T>
struct Scratch {
  Scratch(const Problem& p, std::byte* base, bool backward)
      : next_(reinterpret_cast<uintptr_t>(base)) {
    keys = take<T>(packed_size<T>(p.sk, p.d));
    scores = take<T>(kBlock * padded_keys<T>(p));
    if (p.ratio > 0) {
      words = take<uint32_t>(RandomRows::words_for(p.sk));
    }
    if (backward) {
      values = take<T>(packed_size<T>(p.sk, p.e));
      grads = take<T>(kBlock * padded_keys<T>(p));
      dropped = p.ratio > 0 ? take<T>(kBlock * padded_keys<T>(p)) : scores;
    }
  }
  T *keys = nullptr, *scores = nullptr, *values = nullptr, *grads = nullptr, *dropped = nullptr;
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

// Pointers to the tensors of one head.
template <typename T>
struct Head {
  Head(const KernelContext& op, const Problem& p, int64_t index)
      : q(op.input<T>(0) + index * p.sq * p.d),
        k(op.input<T>(1) + index * p.sk * p.d),
        v(op.input<T>(2) + index * p.sk * p.e),
        mask(op.input<T>(kMaskInput)) {}
  const T *q, *k, *v, *mask;
};

// One row of scaled and masked scores; returns their maximum.
template <typename T>
T finish_scores(const Problem& p, const T* mask, int64_t head, int64_t i, T* row, int64_t n) {
  const T scale = static_cast<T>(p.scale);
  T max = -std::numeric_limits<T>::infinity();
  if (mask != nullptr) {
    const T* mask_row = mask + p.mask_offset(head, i);
    const int64_t stride = p.mask_strides.back();
#pragma omp simd reduction(max : max)
    for (int64_t j = 0; j < n; ++j) {
      row[j] = row[j] * scale + mask_row[j * stride];
      max = row[j] > max ? row[j] : max;
    }
    return max;
  }
#pragma omp simd reduction(max : max)
  for (int64_t j = 0; j < n; ++j) {
    row[j] *= scale;
    max = row[j] > max ? row[j] : max;
  }
  return max;
}

uint32_t drop_limit(double ratio) {
  return static_cast<uint32_t>(std::min(ratio * 0x1p32, 4294967295.0));
}

// out = in where kept, scaled, else 0.
template <typename T>
void drop_row(const Problem& p,
              const RandomRows& random,
              int64_t head,
              int64_t i,
              const T* in,
              T* out,
              int64_t n,
              uint32_t* words) {
  const uint32_t limit = drop_limit(p.ratio);
  const T scale = p.ratio < 1 ? static_cast<T>(1 / (1 - p.ratio)) : T(0);
  const uint32_t* draws = random.draw(head * p.sq + i, n, words);
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    out[j] = draws[j] >= limit ? in[j] * scale : T(0);
  }
}

// y and lse of queries [begin, end), at most kBlock of them.
template <typename T>
void forward_block(KernelContext& op,
                   const Problem& p,
                   const Head<T>& head,
                   int64_t index,
                   int64_t begin,
                   int64_t end,
                   const RandomRows* random,
                   const Scratch<T>& scratch) {
  const int64_t ld = padded_keys<T>(p), n = p.visible(end - 1);
  gemm_packed<T>(
      {head.q + begin * p.d, p.d, 1}, scratch.keys, scratch.scores, ld, end - begin, n, p.d);
  T* lse = op.output<T>(1);
  T factor[kBlock];
  for (int64_t i = begin; i < end; ++i) {
    T* row = scratch.scores + (i - begin) * ld;
    const int64_t visible = p.visible(i);
    const T max = finish_scores(p, head.mask, index, i, row, visible);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < visible; ++j) {
      row[j] = vmath::exp(row[j] - max);
      sum += static_cast<double>(row[j]);
    }
    std::fill(row + visible, row + n, T(0));
    factor[i - begin] = static_cast<T>(1 / sum);
    if (lse != nullptr) {
      lse[index * p.sq + i] = static_cast<T>(static_cast<double>(max) + std::log(sum));
    }
    if (random != nullptr) {
      drop_row(p, *random, index, i, row, row, visible, scratch.words);
    }
  }
  T* y = op.output<T>(0) + (index * p.sq + begin) * p.e;
  gemm_small<T>({scratch.scores, ld, 1}, head.v, p.e, y, p.e, end - begin, p.e, n, false);
  for (int64_t i = 0; i < end - begin; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < p.e; ++j) {
      y[i * p.e + j] *= factor[i];
    }
  }
}

template <typename T>
void forward(KernelContext& op) {
  const Problem p = problem_of(op);
  const Cut work = cut(p.heads * num_chunks(p), op.device().spec().threads);
  const int64_t bytes = Scratch<T>(p, nullptr, false).bytes;
  const RandomRows random_rows(op, p.probabilities);
  const RandomRows* random = p.ratio > 0 ? &random_rows : nullptr;
  op.parallel_for(p.heads * num_chunks(p), work.grain, [&](int64_t first, int64_t last) {
    const Scratch<T> scratch(p, op.workspace().data() + first / work.grain * bytes, false);
    int64_t packed = -1;
    for (int64_t unit = first; unit < last; ++unit) {
      const int64_t index = unit / num_chunks(p), chunk = unit % num_chunks(p) * kChunk;
      const Head<T> head(op, p, index);
      if (packed != index) {
        pack_transposed(head.k, p.sk, p.d, scratch.keys);
        packed = index;
      }
      const int64_t chunk_end = std::min(p.sq, chunk + kChunk);
      for (int64_t i = chunk; i < chunk_end; i += kBlock) {
        forward_block(op, p, head, index, i, std::min(chunk_end, i + kBlock), random, scratch);
      }
    }
  });
}

// Gradients of one head that queries [begin, end) contribute to.
template <typename T>
void backward_block(KernelContext& op,
                    const Problem& p,
                    const Head<T>& head,
                    int64_t index,
                    int64_t begin,
                    int64_t end,
                    const RandomRows* random,
                    const Scratch<T>& scratch) {
  const int64_t ld = padded_keys<T>(p), n = p.visible(end - 1), rows = end - begin;
  const T* y = op.input<T>(4) + (index * p.sq + begin) * p.e;
  const T* lse = op.input<T>(5) + index * p.sq;
  const T* dy = op.input<T>(6) + (index * p.sq + begin) * p.e;
  const T* dlse = op.input<T>(7);
  gemm_packed<T>({head.q + begin * p.d, p.d, 1}, scratch.keys, scratch.scores, ld, rows, n, p.d);
  gemm_packed<T>({dy, p.e, 1}, scratch.values, scratch.grads, ld, rows, n, p.e);
  for (int64_t i = begin; i < end; ++i) {
    T* row = scratch.scores + (i - begin) * ld;
    T* grad = scratch.grads + (i - begin) * ld;
    T* dropped = scratch.dropped + (i - begin) * ld;
    const int64_t visible = p.visible(i);
    finish_scores(p, head.mask, index, i, row, visible);
    double along = 0;  // sum of y dy = sum over keys of probability times its gradient
    for (int64_t j = 0; j < p.e; ++j) {
      along += static_cast<double>(y[(i - begin) * p.e + j]) *
               static_cast<double>(dy[(i - begin) * p.e + j]);
    }
    if (dlse != nullptr) {  // d lse / d score is the probability
      along -= static_cast<double>(dlse[index * p.sq + i]);
    }
    const T shift = lse[i], mean = static_cast<T>(along), scale = static_cast<T>(p.scale);
#pragma omp simd
    for (int64_t j = 0; j < visible; ++j) {
      row[j] = vmath::exp(row[j] - shift);
    }
    if (random != nullptr) {
      drop_row(p, *random, index, i, row, dropped, visible, scratch.words);
      drop_row(p, *random, index, i, grad, grad, visible, scratch.words);
    }
#pragma omp simd
    for (int64_t j = 0; j < visible; ++j) {
      grad[j] = row[j] * (grad[j] - mean) * scale;
    }
    std::fill(dropped + visible, dropped + n, T(0));
    std::fill(grad + visible, grad + n, T(0));
  }
  T* dq = op.output<T>(0);
  if (dq != nullptr) {
    dq += (index * p.sq + begin) * p.d;
    gemm_small<T>({scratch.grads, ld, 1}, head.k, p.d, dq, p.d, rows, p.d, n, false);
  }
  if (T* dk = op.output<T>(1)) {
    dk += index * p.sk * p.d;
    gemm_small<T>({scratch.grads, 1, ld}, head.q + begin * p.d, p.d, dk, p.d, n, p.d, rows, true);
  }
  if (T* dv = op.output<T>(2)) {
    dv += index * p.sk * p.e;
    gemm_small<T>({scratch.dropped, 1, ld}, dy, p.e, dv, p.e, n, p.e, rows, true);
  }
}

template <typename T>
void backward(KernelContext& op) {
  const Problem p = problem_of(op);
  const Cut work = cut(p.heads, op.device().spec().threads);
  const int64_t bytes = Scratch<T>(p, nullptr, true).bytes;
  const RandomRows random_rows(op, p.probabilities);
  const RandomRows* random = p.ratio > 0 ? &random_rows : nullptr;
  op.parallel_for(p.heads, work.grain, [&](int64_t first, int64_t last) {
    const Scratch<T> scratch(p, op.workspace().data() + first / work.grain * bytes, true);
    for (int64_t index = first; index < last; ++index) {
      const Head<T> head(op, p, index);
      pack_transposed(head.k, p.sk, p.d, scratch.keys);
      pack_transposed(head.v, p.sk, p.e, scratch.values);
      if (T* dk = op.output<T>(1)) {
        std::fill(dk + index * p.sk * p.d, dk + (index + 1) * p.sk * p.d, T(0));
      }
      if (T* dv = op.output<T>(2)) {
        std::fill(dv + index * p.sk * p.e, dv + (index + 1) * p.sk * p.e, T(0));
      }
      for (int64_t i = 0; i < p.sq; i += kBlock) {
        backward_block(op, p, head, index, i, std::min(p.sq, i + kBlock), random, scratch);
      }
    }
  });
}

// ---- reference -------------------------------------------------------------------------------

// Probabilities of one query before and after dropout, and the log of the sum of exponentials.
struct Row {
  std::vector<double> plain, dropped;
  double lse = 0;
};

template <typename T>
Row reference_row(const KernelContext& op, const Problem& p, int64_t head, int64_t i) {
  const Head<T> t(op, p, head);
  const int64_t n = p.visible(i);
  Row row;
  row.plain.resize(static_cast<size_t>(n));
  double max = -std::numeric_limits<double>::infinity(), sum = 0;
  for (int64_t j = 0; j < n; ++j) {
    double score = 0;
    for (int64_t c = 0; c < p.d; ++c) {
      score += load<double>(t.q[i * p.d + c]) * load<double>(t.k[j * p.d + c]);
    }
    score *= p.scale;
    if (p.has_mask) {
      score += load<double>(t.mask[p.mask_offset(head, i) + j * p.mask_strides.back()]);
    }
    row.plain[static_cast<size_t>(j)] = score;
    max = std::max(max, score);
  }
  for (double& value : row.plain) {
    value = std::exp(value - max);
    sum += value;
  }
  for (double& value : row.plain) {
    value /= sum;
  }
  row.lse = max + std::log(sum);
  row.dropped = row.plain;
  if (p.ratio > 0) {
    std::vector<uint32_t> words(static_cast<size_t>(RandomRows::words_for(p.sk)));
    drop_row(p,
             RandomRows(op, p.probabilities),
             head,
             i,
             row.plain.data(),
             row.dropped.data(),
             n,
             words.data());
  }
  return row;
}

template <typename T>
void forward_plain(KernelContext& op) {
  const Problem p = problem_of(op);
  for (int64_t r = 0; r < p.heads * p.sq; ++r) {
    const Row row = reference_row<T>(op, p, r / p.sq, r % p.sq);
    const T* v = op.input<T>(2) + r / p.sq * p.sk * p.e;
    for (int64_t c = 0; c < p.e; ++c) {
      double sum = 0;
      for (size_t j = 0; j < row.dropped.size(); ++j) {
        sum += row.dropped[j] * load<double>(v[static_cast<int64_t>(j) * p.e + c]);
      }
      op.output<T>(0)[r * p.e + c] = store<T>(sum);
    }
    if (op.has_output(1)) {
      op.output<T>(1)[r] = store<T>(row.lse);
    }
  }
}

// dq, dk, dv in double, from the definition: no use of y and lse.
template <typename T>
void backward_plain(KernelContext& op) {
  const Problem p = problem_of(op);
  std::vector<double> dq(static_cast<size_t>(p.heads * p.sq * p.d));
  std::vector<double> dk(static_cast<size_t>(p.heads * p.sk * p.d));
  std::vector<double> dv(static_cast<size_t>(p.heads * p.sk * p.e));
  for (int64_t r = 0; r < p.heads * p.sq; ++r) {
    const int64_t head = r / p.sq;
    const Head<T> t(op, p, head);
    const Row row = reference_row<T>(op, p, head, r % p.sq);
    const T* dy = op.input<T>(6) + r * p.e;
    const size_t n = row.plain.size();
    std::vector<double> grad(n);
    double mean = op.has_input(7) ? -load<double>(op.input<T>(7)[r]) : 0.0;
    for (size_t j = 0; j < n; ++j) {
      for (int64_t c = 0; c < p.e; ++c) {
        const int64_t at = static_cast<int64_t>(j) * p.e + c;
        grad[j] += load<double>(dy[c]) * load<double>(t.v[at]);
        dv[static_cast<size_t>(head * p.sk * p.e + at)] += row.dropped[j] * load<double>(dy[c]);
      }
      grad[j] *= row.plain[j] > 0 ? row.dropped[j] / row.plain[j] : 1.0;
      mean += grad[j] * row.plain[j];
    }
    for (size_t j = 0; j < n; ++j) {
      const double ds = row.plain[j] * (grad[j] - mean) * p.scale;
      for (int64_t c = 0; c < p.d; ++c) {
        const int64_t key = static_cast<int64_t>(j) * p.d + c, query = r % p.sq * p.d + c;
        dq[static_cast<size_t>(r * p.d + c)] += ds * load<double>(t.k[key]);
        dk[static_cast<size_t>(head * p.sk * p.d + key)] += ds * load<double>(t.q[query]);
      }
    }
  }
  const std::vector<double>* sums[] = {&dq, &dk, &dv};
  for (int i = 0; i < 3; ++i) {
    for (size_t j = 0; op.has_output(i) && j < sums[i]->size(); ++j) {
      op.output<T>(i)[j] = store<T>((*sums[i])[j]);
    }
  }
}

}  // namespace

int64_t Problem::mask_offset(int64_t head, int64_t i) const {
  int64_t offset = i * mask_strides[mask_strides.size() - 2];
  for (size_t axis = probabilities.size() - 2; axis-- > 0;) {
    offset += head % probabilities[axis] * mask_strides[axis];
    head /= probabilities[axis];
  }
  return offset;
}

Problem problem_of(const OpContext& op) {
  return make_problem(op);
}
Problem problem_of(const KernelContext& op) {
  return make_problem(op);
}

int64_t forward_workspace(const OpContext& op, const DeviceSpec& spec) {
  const Problem p = problem_of(op);
  if (spec.backend != Backend::kCpu) {
    return 0;
  }
  const int64_t tasks = cut(p.heads * num_chunks(p), spec.threads).tasks;
  switch (op.input_dtype(0)) {
    case DType::kFloat32:
      return tasks * Scratch<float>(p, nullptr, false).bytes;
    case DType::kFloat64:
      return tasks * Scratch<double>(p, nullptr, false).bytes;
    default:
      return 0;
  }
}

int64_t backward_workspace(const OpContext& op, const DeviceSpec& spec) {
  const Problem p = problem_of(op);
  if (spec.backend != Backend::kCpu) {
    return 0;
  }
  const int64_t tasks = cut(p.heads, spec.threads).tasks;
  switch (op.input_dtype(0)) {
    case DType::kFloat32:
      return tasks * Scratch<float>(p, nullptr, true).bytes;
    case DType::kFloat64:
      return tasks * Scratch<double>(p, nullptr, true).bytes;
    default:
      return 0;
  }
}

// 16-bit floats have no kernel of their own on the CPU: the plain one computes in double.
void forward_fast(KernelContext& op) {
  switch (op.input_dtype(0)) {
    case DType::kFloat32:
      return forward<float>(op);
    case DType::kFloat64:
      return forward<double>(op);
    default:
      return forward_reference(op);
  }
}

void backward_fast(KernelContext& op) {
  switch (op.input_dtype(0)) {
    case DType::kFloat32:
      return backward<float>(op);
    case DType::kFloat64:
      return backward<double>(op);
    default:
      return backward_reference(op);
  }
}

void forward_reference(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { forward_plain<decltype(tag)>(op); });
}

void backward_reference(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { backward_plain<decltype(tag)>(op); });
}

}  // namespace trainrt::attention
