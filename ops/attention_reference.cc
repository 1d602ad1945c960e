// FusedAttention by its definition, in double: what the fast kernels are tested against.
#include <cmath>
#include <limits>

#include "ops/attention.h"
#include "ops/random_draw.h"
#include "ops/rows.h"

namespace trainrt::attention {

namespace {

// Probabilities of one query before and after dropout, and the log of the sum of exponentials.
struct Row {
  std::vector<double> plain, dropped;
  double lse = 0;
};

// One query of one head, as positions in the tensors.
struct Query {
  Query(const Problem& p, int64_t row)
      : index(row / p.sq),
        i(row % p.sq),
        sample(index / p.heads),
        head(index % p.heads),
        kv_head(head / p.group()),
        q(p.q.offset(sample, head) + i * p.q.row),
        y(p.y.offset(sample, head) + i * p.y.row),
        k(p.k.offset(sample, kv_head)),
        v(p.v.offset(sample, kv_head)) {}
  int64_t index, i, sample, head, kv_head;
  int64_t q, y;  // of the query's row
  int64_t k, v;  // of the head's first row
};

// The gradient takes `lse` as it is given.
template <typename T>
Row probabilities(const KernelContext& op,
                  const Problem& p,
                  const Query& at,
                  const Compute<T>* lse = nullptr) {
  const T* q = op.input<T>(0) + at.q;
  const int64_t n = p.visible(at.i);
  Row row;
  row.plain.resize(static_cast<size_t>(n));
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < n; ++j) {
    const T* k = op.input<T>(1) + at.k + j * p.k.row;
    double score = 0;
    for (int64_t c = 0; c < p.d; ++c) {
      score += load<double>(q[c]) * load<double>(k[c]);
    }
    score *= p.scale;
    if (p.has_mask) {
      score += static_cast<double>(op.input<Compute<T>>(
          kMaskInput)[p.mask_offset(at.index, at.i) + j * p.mask_strides.back()]);
    }
    row.plain[static_cast<size_t>(j)] = score;
    max = std::max(max, score);
  }
  double sum = 0;
  for (const double score : row.plain) {
    sum += std::exp(score - max);
  }
  row.lse = lse != nullptr ? static_cast<double>(*lse) : max + std::log(sum);
  double total = 0;
  for (double& value : row.plain) {
    value = std::exp(value - row.lse);
    total += value;
  }
  if (p.has_mask) {
    for (double& value : row.plain) {
      value /= total;
    }
  }
  row.dropped = row.plain;
  if (p.ratio > 0) {
    std::vector<uint32_t> words(static_cast<size_t>(RandomRows::words_for(p.sk)));
    const RandomRows random(op, p.probabilities);
    const uint32_t* draws = random.draw(at.index * p.sq + at.i, n, words.data());
    const double kept = p.ratio < 1 ? 1 / (1 - p.ratio) : 0;
    for (int64_t j = 0; j < n; ++j) {
      row.dropped[static_cast<size_t>(j)] *= draws[j] >= drop_limit(p.ratio) ? kept : 0;
    }
  }
  return row;
}

template <typename T>
void forward_plain(KernelContext& op) {
  const Problem p = problem_of(op);
  for (int64_t r = 0; r < p.samples * p.heads * p.sq; ++r) {
    const Query at(p, r);
    const Row row = probabilities<T>(op, p, at);
    for (int64_t c = 0; c < p.e; ++c) {
      double sum = 0;
      for (size_t j = 0; j < row.dropped.size(); ++j) {
        sum += row.dropped[j] *
               load<double>(op.input<T>(2)[at.v + static_cast<int64_t>(j) * p.v.row + c]);
      }
      op.output<T>(0)[at.y + c] = store<T>(sum);
    }
    if (op.has_output(1)) {
      op.output<Compute<T>>(1)[r] = static_cast<Compute<T>>(row.lse);
    }
  }
}

// dq, dk, dv and the mask's gradient in double, from the definition: no use of y.
template <typename T>
void backward_plain(KernelContext& op) {
  const Problem p = problem_of(op);
  std::vector<double> sums[4];
  for (int i = 0; i < 4; ++i) {
    sums[i].resize(op.has_input(i) ? static_cast<size_t>(num_elements(op.input_shape(i))) : 0);
  }
  auto& [dq, dk, dv, dmask] = sums;
  for (int64_t r = 0; r < p.samples * p.heads * p.sq; ++r) {
    const Query at(p, r);
    const Row row = probabilities<T>(op, p, at, op.input<Compute<T>>(5) + r);
    const T* dy = op.input<T>(6) + at.y;
    const size_t n = row.plain.size();
    std::vector<double> grad(n);
    double mean = op.has_input(7) ? -static_cast<double>(op.input<Compute<T>>(7)[r]) : 0.0;
    for (size_t j = 0; j < n; ++j) {
      for (int64_t c = 0; c < p.e; ++c) {
        const int64_t value = at.v + static_cast<int64_t>(j) * p.v.row + c;
        grad[j] += load<double>(dy[c]) * load<double>(op.input<T>(2)[value]);
        dv[static_cast<size_t>(value)] += row.dropped[j] * load<double>(dy[c]);
      }
      grad[j] *= row.plain[j] > 0 ? row.dropped[j] / row.plain[j] : 1.0;
      mean += grad[j] * row.plain[j];
    }
    for (size_t j = 0; j < n; ++j) {
      const double ds = row.plain[j] * (grad[j] - mean);
      for (int64_t c = 0; c < p.d; ++c) {
        const int64_t key = at.k + static_cast<int64_t>(j) * p.k.row + c;
        dq[static_cast<size_t>(at.q + c)] += ds * p.scale * load<double>(op.input<T>(1)[key]);
        dk[static_cast<size_t>(key)] += ds * p.scale * load<double>(op.input<T>(0)[at.q + c]);
      }
      if (p.has_mask) {
        dmask[static_cast<size_t>(p.mask_offset(at.index, at.i) +
                                  static_cast<int64_t>(j) * p.mask_strides.back())] += ds;
      }
    }
  }
  for (int i = 0; i < kMaskInput; ++i) {
    for (size_t j = 0; op.has_output(i) && j < sums[i].size(); ++j) {
      op.output<T>(i)[j] = store<T>(sums[i][j]);
    }
  }
  for (size_t j = 0; op.has_output(kMaskInput) && j < dmask.size(); ++j) {
    op.output<Compute<T>>(kMaskInput)[j] = static_cast<Compute<T>>(dmask[j]);
  }
}

}  // namespace

void forward_reference(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { forward_plain<decltype(tag)>(op); });
}

void backward_reference(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { backward_plain<decltype(tag)>(op); });
}

}  // namespace trainrt::attention
