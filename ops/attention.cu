// CUDA kernels of FusedAttention and its gradient (ops/attention.cc describes them).
//
// cuDNN's fused engines (ops/attention_cudnn.cuh) run what they take. All else: products of several
// heads or samples at a time by cuBLASLt, which reads heads where the layout has them, and row-wise
// work on the scores between them. The gradient makes the scores again from q, k and the
// saved log of the row sums.
#include <cmath>
#include <limits>
#include <memory>

#include "ops/attention.h"
#include "ops/attention_cudnn.cuh"
#include "ops/attention_products.cuh"
#include "ops/attention_scratch.h"
#include "ops/launch.cuh"
#include "ops/random_draw.cuh"
#include "ops/vector_math.h"

namespace trainrt::attention {

namespace {

// What rows of scores go through: mask, causality and dropout. `index` is sample * heads + head.
template <typename C>
struct Rules {
  int64_t sq, sk;
  bool causal;
  const C* mask;
  int num_outer;  // dims of samples and heads
  int64_t outer[kMaxDims], mask_strides[kMaxDims], mask_row, mask_column;
  DeviceDraws draws;
  bool drops;
  uint32_t limit;
  double scale;  // of what dropout keeps

  TRAINRT_HOST_DEVICE int64_t visible(int64_t i) const { return causal && i + 1 < sk ? i + 1 : sk; }
  TRAINRT_HOST_DEVICE const C* mask_of(int64_t index, int64_t i) const {
    if (mask == nullptr) {
      return nullptr;
    }
    int64_t offset = i * mask_row;
    for (int d = num_outer - 1; d >= 0; --d) {
      offset += index % outer[d] * mask_strides[d];
      index /= outer[d];
    }
    return mask + offset;
  }
  TRAINRT_HOST_DEVICE C masked(C score, const C* row, int64_t j) const {
    return row == nullptr ? score : score + row[j * mask_column];
  }
  // The draws of row i of a head.
  TRAINRT_HOST_DEVICE DeviceDraws::Row row_draws(int64_t index, int64_t i) const {
    return drops && sk > 0 ? draws.row((index * sq + i) * sk) : DeviceDraws::Row{};
  }
  TRAINRT_HOST_DEVICE C dropped(C value, const DeviceDraws::Row& row, int64_t j) const {
    if (!drops) {
      return value;
    }
    return row[j] >= limit ? value * static_cast<C>(scale) : C(0);
  }
};

template <typename C>
Rules<C> rules_of(const KernelContext& context, const Problem& p) {
  Rules<C> rules{p.sq,
                 p.sk,
                 p.causal,
                 p.has_mask ? context.input<C>(kMaskInput) : nullptr,
                 static_cast<int>(p.probabilities.size()) - 2,
                 {},
                 {},
                 0,
                 0,
                 DeviceDraws(draw_source(context, p.probabilities)),
                 p.ratio > 0,
                 drop_limit(p.ratio),
                 drop_scale(p.ratio)};
  for (int d = 0; d < rules.num_outer; ++d) {
    rules.outer[d] = p.probabilities[static_cast<size_t>(d)];
    rules.mask_strides[d] = p.has_mask ? p.mask_strides[static_cast<size_t>(d)] : 0;
  }
  if (p.has_mask) {
    rules.mask_row = p.mask_strides[p.mask_strides.size() - 2];
    rules.mask_column = p.mask_strides.back();
  }
  return rules;
}

// Scores become probabilities after dropout; the log of the row sum is kept. `out` may be `scores`.
// Rows are those of consecutive heads, the first of which is `first`.
template <typename T>
struct SoftmaxRow {
  using C = ComputeOf<T>;
  Rules<C> rules;
  int64_t first;
  const C* scores;
  T* out;
  C* lse;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t r) const {
    const int64_t index = first + r / rules.sq, i = r % rules.sq, n = rules.visible(i);
    const C* row = scores + r * rules.sk;
    T* to = out + r * rules.sk;
    const Rules<C>& rule = rules;
    const C* mask = rules.mask_of(index, i);
    const C max = team.reduce(
        n,
        -std::numeric_limits<C>::infinity(),
        [&](int64_t j) { return rule.masked(row[j], mask, j); },
        [](C a, C b) { return a > b ? a : b; });
    const C sum = team_sum<C>(
        team, n, [&](int64_t j) { return vmath::exp(rule.masked(row[j], mask, j) - max); });
    const DeviceDraws::Row draws = rules.row_draws(index, i);
    team.for_each(rules.sk, [&](int64_t j) {
      const C p = j < n ? vmath::exp(rule.masked(row[j], mask, j) - max) / sum : C(0);
      to[j] = to_storage<T>(j < n ? rule.dropped(p, draws, j) : p);
    });
    if (team.leads() && lse != nullptr) {
      lse[first * rules.sq + r] = max + vmath::log(sum);
    }
  }
};

// Scores and the gradients of dropped probabilities become dropped probabilities and the gradients
// of scores (not yet times `scale`). The results may lie over the inputs.
template <typename T>
struct GradRow {
  using C = ComputeOf<T>;
  Rules<C> rules;
  int64_t first, heads, e;  // first: sample * heads + head of the first row
  Layout y_layout;
  const C* scores;
  C* grads;
  const T *y, *dy;
  const C *lse, *dlse;
  T *dropped, *score_grads;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t r) const {
    const int64_t index = first + r / rules.sq, i = r % rules.sq, n = rules.visible(i);
    const int64_t y_at =
        index / heads * y_layout.sample + index % heads * y_layout.head + i * y_layout.row;
    const GradRow& self = *this;
    const Rules<C>& rule = rules;
    const C* mask = rules.mask_of(index, i);
    // Sum of y dy = sum over keys of probability times its gradient.
    C mean = team_sum<C>(team, e, [&](int64_t c) {
      return to_compute<C>(self.y[y_at + c]) * to_compute<C>(self.dy[y_at + c]);
    });
    if (dlse != nullptr) {  // d lse / d score is the probability
      mean -= dlse[index * rules.sq + i];
    }
    const C shift = lse[index * rules.sq + i];
    const auto probability = [&](int64_t j) {
      return vmath::exp(rule.masked(self.scores[r * rule.sk + j], mask, j) - shift);
    };
    const C total = mask == nullptr ? C(1) : team_sum<C>(team, n, probability);
    const DeviceDraws::Row draws = rules.row_draws(index, i);
    team.for_each(rules.sk, [&](int64_t j) {
      const int64_t at = r * rule.sk + j;
      C p = 0, grad = 0;
      if (j < n) {
        p = probability(j) / total;
        grad = p * (rule.dropped(self.grads[at], draws, j) - mean);
        p = rule.dropped(p, draws, j);
      }
      self.dropped[at] = to_storage<T>(p);
      self.grads[at] = grad;
      self.score_grads[at] = to_storage<T>(grad);
    });
  }
};

// The mask's gradient: the gradients of the scores of some heads of a sample, summed over what the
// mask repeats, are added to what earlier heads gave. One thread per element of the mask.
template <typename C>
struct AddMaskGrad {
  int64_t sq, sk, sample, head, num_heads;
  int num_sample_dims;
  int64_t sample_dims[kMaxDims], sample_strides[kMaxDims];
  int64_t heads, head_stride, row_stride, column_stride;
  const C* grads;
  C* sums;

  TRAINRT_HOST_DEVICE void operator()(int64_t m) const {
    int64_t rest = sample;
    for (int d = num_sample_dims - 1; d >= 0; --d) {
      const int64_t own = rest % sample_dims[d];
      rest /= sample_dims[d];
      if (sample_strides[d] != 0 && m / sample_strides[d] % sample_dims[d] != own) {
        return;  // another sample's
      }
    }
    int64_t h = 0, h_end = num_heads, i = 0, i_end = sq, j = 0, j_end = sk;
    if (head_stride != 0) {
      h = m / head_stride % heads - head;
      if (h < 0 || h >= num_heads) {
        return;
      }
      h_end = h + 1;
    }
    if (row_stride != 0) {
      i = m / row_stride % sq;
      i_end = i + 1;
    }
    if (column_stride != 0) {
      j = m / column_stride % sk;
      j_end = j + 1;
    }
    C sum = sums[m];
    for (int64_t a = h; a < h_end; ++a) {
      for (int64_t b = i; b < i_end; ++b) {
        for (int64_t c = j; c < j_end; ++c) {
          sum += grads[(a * sq + b) * sk + c];
        }
      }
    }
    sums[m] = sum;
  }
};

std::span<std::byte> cublas_room(const KernelContext& context, const DeviceScratch& cut) {
  return context.workspace().subspan(static_cast<size_t>(cut.arrays()));
}

template <typename T>
void forward(KernelContext& context,
             const Problem& p,
             const DeviceScratch& cut,
             Products& products) {
  using C = ComputeOf<T>;
  std::byte* base = context.workspace().data();
  C* scores = reinterpret_cast<C*>(base);
  T* probabilities =
      cut.narrow > 0 ? reinterpret_cast<T*>(base + cut.wide) : reinterpret_cast<T*>(scores);
  const std::span<std::byte> room = cublas_room(context, cut);
  const Rules<C> rules = rules_of<C>(context, p);
  for_each_chunk(p, cut, [&](const Chunk& chunk) {
    for_each_batch<T>(p, chunk, [&](const Views<T>& views, int64_t n) {
      for (int64_t r = 0; r < p.group(); ++r) {
        products.run(context,
                     "scores",
                     n,
                     views.queries(context.input<T>(0), p.q, p.d, r),
                     views.keys(context.input<T>(1), p.k, p.d, true),
                     views.to_scores(scores, r),
                     p.scale,
                     room);
      }
    });
    launch_teams(
        context,
        chunk.num_matrices() * p.group() * p.sq,
        p.sk,
        SoftmaxRow<T>{rules, chunk.first_head(p), scores, probabilities, context.output<C>(1)});
    for_each_batch<T>(p, chunk, [&](const Views<T>& views, int64_t n) {
      for (int64_t r = 0; r < p.group(); ++r) {
        products.run(context,
                     "y",
                     n,
                     views.scores(probabilities, r, false),
                     views.keys(context.input<T>(2), p.v, p.e, false),
                     views.to_queries(context.output<T>(0), p.y, r),
                     1,
                     room);
      }
    });
  });
}

template <typename C>
AddMaskGrad<C> mask_grad_of(const Problem& p, const Chunk& chunk, const C* grads, C* sums) {
  const bool has_heads = p.probabilities.size() > 2;
  AddMaskGrad<C> add{p.sq,
                     p.sk,
                     chunk.sample,
                     chunk.kv_head * p.group(),
                     chunk.num_kv_heads * p.group(),
                     std::max(0, static_cast<int>(p.probabilities.size()) - 3),
                     {},
                     {},
                     p.heads,
                     has_heads ? p.mask_strides[p.mask_strides.size() - 3] : 0,
                     p.mask_strides[p.mask_strides.size() - 2],
                     p.mask_strides.back(),
                     grads,
                     sums};
  for (int d = 0; d < add.num_sample_dims; ++d) {
    add.sample_dims[d] = p.probabilities[static_cast<size_t>(d)];
    add.sample_strides[d] = p.mask_strides[static_cast<size_t>(d)];
  }
  return add;
}

template <typename T>
void backward(KernelContext& context,
              const Problem& p,
              const DeviceScratch& cut,
              Products& products) {
  using C = ComputeOf<T>;
  std::byte* base = context.workspace().data();
  C* scores = reinterpret_cast<C*>(base);
  C* grads = reinterpret_cast<C*>(base + cut.wide);
  std::byte* narrow = base + 2 * cut.wide;
  T* dropped = cut.narrow > 0 ? reinterpret_cast<T*>(narrow) : reinterpret_cast<T*>(scores);
  T* score_grads =
      cut.narrow > 0 ? reinterpret_cast<T*>(narrow + cut.narrow) : reinterpret_cast<T*>(grads);
  const std::span<std::byte> room = cublas_room(context, cut);
  const Rules<C> rules = rules_of<C>(context, p);
  C* dmask = p.has_mask ? context.output<C>(kMaskInput) : nullptr;
  const int64_t mask_size = dmask != nullptr ? num_elements(context.output_shape(kMaskInput)) : 0;
  if (dmask != nullptr) {
    TRAINRT_CUDA_CHECK(cudaMemsetAsync(
        dmask, 0, static_cast<size_t>(mask_size) * sizeof(C), cuda_context(context).cuda_stream()));
  }
  for (const int keys : {1, 2}) {  // without queries nothing is added to their gradients
    if (p.heads == 0 && context.has_output(keys)) {
      TRAINRT_CUDA_CHECK(cudaMemsetAsync(context.raw_output(keys),
                                         0,
                                         static_cast<size_t>(context.output_type(keys).bytes()),
                                         cuda_context(context).cuda_stream()));
    }
  }
  const T *q = context.input<T>(0), *k = context.input<T>(1), *v = context.input<T>(2),
          *dy = context.input<T>(6);
  for_each_chunk(p, cut, [&](const Chunk& chunk) {
    for_each_batch<T>(p, chunk, [&](const Views<T>& views, int64_t n) {
      for (int64_t r = 0; r < p.group(); ++r) {
        products.run(context,
                     "scores",
                     n,
                     views.queries(q, p.q, p.d, r),
                     views.keys(k, p.k, p.d, true),
                     views.to_scores(scores, r),
                     p.scale,
                     room);
        products.run(context,
                     "grads",
                     n,
                     views.queries(dy, p.y, p.e, r),
                     views.keys(v, p.v, p.e, true),
                     views.to_scores(grads, r),
                     1,
                     room);
      }
    });
    launch_teams(context,
                 chunk.num_matrices() * p.group() * p.sq,
                 p.sk,
                 GradRow<T>{rules,
                            chunk.first_head(p),
                            p.heads,
                            p.e,
                            p.y,
                            scores,
                            grads,
                            context.input<T>(4),
                            dy,
                            context.input<C>(5),
                            context.input<C>(7),
                            dropped,
                            score_grads});
    if (dmask != nullptr) {
      for_each_sample(p, chunk, [&](const Chunk& sample, int64_t earlier) {
        const C* own = grads + earlier * p.sq * p.sk;
        launch(context, mask_size, mask_grad_of(p, sample, own, dmask));
      });
    }
    for_each_batch<T>(p, chunk, [&](const Views<T>& views, int64_t n) {
      for (int64_t r = 0; r < p.group(); ++r) {
        // The heads of a group add to one dk and dv.
        const std::string adds = r > 0 ? "+" : "";
        const auto multiply = [&](const std::string& name,
                                  const auto& a,
                                  const auto& b,
                                  const auto& y,
                                  double scale) {
          products.run(context, name, n, a, b, y, scale, room);
        };
        if (T* dq = context.output<T>(0)) {
          multiply("dq",
                   views.scores(score_grads, r, false),
                   views.keys(k, p.k, p.d, false),
                   views.to_queries(dq, p.q, r),
                   p.scale);
        }
        if (T* dk = context.output<T>(1)) {
          const auto queries = views.queries(q, p.q, p.d, r);
          multiply("dk" + adds,
                   views.scores(score_grads, r, true),
                   queries,
                   views.to_keys(dk, p.k, r),
                   p.scale);
        }
        if (T* dv = context.output<T>(2)) {
          const auto dy_rows = views.queries(dy, p.y, p.e, r);
          multiply(
              "dv" + adds, views.scores(dropped, r, true), dy_rows, views.to_keys(dv, p.v, r), 1);
        }
      }
    });
  });
}

// Products and softmax apart, where no fused engine takes the node.
void run_apart(KernelContext& context,
               const Problem& p,
               const DeviceScratch& cut,
               Products& products) {
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    if (context.node().op_type == "FusedAttentionGrad") {
      backward<T>(context, p, cut, products);
    } else {
      forward<T>(context, p, cut, products);
    }
  });
}

Kernel attention_cuda(const OpContext& op, const DeviceSpec& spec) {
  const Problem p = problem_of(op);
  const DType dtype = op.input_dtype(0);
  const CudaScratch cut(op, p, spec);
  const char* const why_not = why_not_fused(op, p, spec);
  auto products = std::make_shared<Products>(dtype, cut.apart.cublas);
  auto fused = cut.fused ? std::make_shared<FusedAttention>(op, p, *cut.fused) : nullptr;
  return [p, cut, why_not, products, fused](KernelContext& context) {
    CudaContext& cuda = cuda_context(context);
    if (fused != nullptr && fused->run(context)) {
      return;
    }
    const std::string& type = context.node().op_type;
    if (fused != nullptr) {
      cuda.note(concat(type, ": ", fused->why_not(cuda), "; products and softmax run apart"));
    } else if (dtype_bytes(context.input_dtype(0)) == 2) {
      cuda.note(concat(type,
                       ": cuDNN's fused attention does not take ",
                       why_not,
                       "; products and softmax run apart"));
    }
    run_apart(context, p, cut.apart, *products);
  };
}

const RegisterKernel kForward{"FusedAttention", Backend::kCuda, attention_cuda};
const RegisterKernel kBackward{"FusedAttentionGrad", Backend::kCuda, attention_cuda};

}  // namespace

}  // namespace trainrt::attention
