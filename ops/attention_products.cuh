// The matrix products of attention that runs apart, by cuBLASLt: how operands lie, and what is one
// batch.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include "ops/attention.h"
#include "ops/attention_scratch.h"
#include "ops/cublas.cuh"

namespace trainrt::attention {

// A matrix of every head of a batch: how it lies, and how far apart the heads are.
struct Heads {
  const void* data = nullptr;
  cublas::Operand operand;
  int64_t stride = 0;     // elements from head to head
  int64_t alignment = 0;  // of the first head
};

// The products of one node, by role and number of heads: the last chunk may be short.
class Products {
 public:
  Products(DType dtype, int64_t workspace)
      : dtype_(dtype), workspace_(cublas::usable_bytes(workspace)) {}

  struct Result {
    void* data;
    int64_t row, stride;  // elements between rows, between heads
    int64_t alignment;
    bool wide = false;
    bool adds = false;
  };

  // result = alpha a . b for `heads` heads.
  void run(KernelContext& context,
           const std::string& role,
           int64_t heads,
           const Heads& a,
           const Heads& b,
           const Result& result,
           double alpha,
           std::span<std::byte> workspace) {
    std::unique_ptr<cublas::Matmul>& matmul = matmuls_[{role, heads}];
    if (matmul == nullptr) {
      cublas::Problem problem;
      problem.dtype = dtype_;
      problem.wide_y = result.wide && dtype_bytes(dtype_) == 2;
      problem.a = a.operand;
      problem.b = b.operand;
      problem.y_stride = result.row;
      problem.batch = heads;
      problem.a_batch_stride = a.stride;
      problem.b_batch_stride = b.stride;
      problem.y_batch_stride = result.stride;
      problem.alpha = alpha;
      problem.beta = result.adds ? 1 : 0;
      problem.a_alignment = a.alignment;
      problem.b_alignment = b.alignment;
      problem.y_alignment = result.alignment;
      problem.workspace_bytes = workspace_;
      matmul = std::make_unique<cublas::Matmul>(problem);
    }
    matmul->run(context, a.data, b.data, result.data, workspace);
  }

 private:
  DType dtype_;
  int64_t workspace_;
  std::map<std::pair<std::string, int64_t>, std::unique_ptr<cublas::Matmul>> matmuls_;
};

// All heads of some samples, or some heads of one.
struct Chunk {
  int64_t sample, num_samples, kv_head, num_kv_heads;

  int64_t first_head(const Problem& p) const { return sample * p.heads + kv_head * p.group(); }
  int64_t num_matrices() const { return num_samples * num_kv_heads; }  // in a batch of products
};

// What products of a chunk read and write. `r` numbers the query heads that share a head of k and
// v; `earlier` the heads whose scores lie before.
template <typename T>
class Views {
 public:
  Views(const Problem& p, const Chunk& chunk, int64_t earlier)
      : p_(p), chunk_(chunk), earlier_(earlier) {}

  Heads queries(const T* data, const Layout& layout, int64_t width, int64_t r) const {
    return {data + layout.offset(chunk_.sample, first_head() + r),
            {p_.sq, width, layout.row, false},
            p_.group() * layout.head,
            alignment(layout)};
  }
  Heads keys(const T* data, const Layout& layout, int64_t width, bool transposed) const {
    const T* first = data + layout.offset(chunk_.sample, chunk_.kv_head);
    return {first, operand(p_.sk, width, layout.row, transposed), layout.head, alignment(layout)};
  }
  template <typename U>
  Heads scores(const U* data, int64_t r, bool transposed) const {
    return {data + (earlier_ + r) * matrix(),
            operand(p_.sq, p_.sk, p_.sk, transposed),
            p_.group() * matrix(),
            std::gcd(cublas::kArenaBytes, matrix() * static_cast<int64_t>(sizeof(U)))};
  }
  template <typename U>
  Products::Result to_scores(U* data, int64_t r) const {
    return {data + (earlier_ + r) * matrix(),
            p_.sk,
            p_.group() * matrix(),
            std::gcd(cublas::kArenaBytes, matrix() * static_cast<int64_t>(sizeof(U))),
            true};
  }
  Products::Result to_queries(T* data, const Layout& layout, int64_t r) const {
    return {data + layout.offset(chunk_.sample, first_head() + r),
            layout.row,
            p_.group() * layout.head,
            alignment(layout)};
  }
  Products::Result to_keys(T* data, const Layout& layout, int64_t r) const {
    return {data + layout.offset(chunk_.sample, chunk_.kv_head),
            layout.row,
            layout.head,
            alignment(layout),
            false,
            r > 0};
  }

 private:
  int64_t first_head() const { return chunk_.kv_head * p_.group(); }
  int64_t matrix() const { return p_.sq * p_.sk; }
  // A matrix of `rows` x `columns` in memory, read as it lies or transposed.
  static cublas::Operand operand(int64_t rows, int64_t columns, int64_t stride, bool transposed) {
    cublas::Operand result{rows, columns, stride, transposed};
    if (transposed) {
      std::swap(result.rows, result.columns);
    }
    return result;
  }
  int64_t alignment(const Layout& layout) const {
    return std::gcd(std::gcd(cublas::kArenaBytes, layout.sample * static_cast<int64_t>(sizeof(T))),
                    layout.head * static_cast<int64_t>(sizeof(T)));
  }
  const Problem& p_;
  const Chunk& chunk_;
  int64_t earlier_;
};

template <typename Fn>
void for_each_chunk(const Problem& p, const DeviceScratch& cut, const Fn& fn) {
  for (int64_t sample = 0; sample < p.samples; sample += cut.samples) {
    for (int64_t head = 0; head < p.kv_heads; head += cut.kv_heads) {
      fn(Chunk{sample,
               std::min(cut.samples, p.samples - sample),
               head,
               std::min(cut.kv_heads, p.kv_heads - head)});
    }
  }
}

template <typename Fn>
void for_each_sample(const Problem& p, const Chunk& chunk, const Fn& fn) {
  for (int64_t s = 0; s < chunk.num_samples; ++s) {
    fn(Chunk{chunk.sample + s, 1, chunk.kv_head, chunk.num_kv_heads}, s * p.heads);
  }
}

// Calls fn(views, number of products) for what is one batch: all of the chunk where the heads of
// the next sample are as far as those of one, else a sample.
template <typename T, typename Fn>
void for_each_batch(const Problem& p, const Chunk& chunk, const Fn& fn) {
  const auto dense = [](const Layout& layout, int64_t heads) {
    return layout.sample == heads * layout.head;
  };
  if (dense(p.q, p.heads) && dense(p.k, p.kv_heads) && dense(p.v, p.kv_heads) &&
      dense(p.y, p.heads)) {
    fn(Views<T>(p, chunk, 0), chunk.num_matrices());
    return;
  }
  for_each_sample(p, chunk, [&](const Chunk& sample, int64_t earlier) {
    fn(Views<T>(p, sample, earlier), sample.num_matrices());
  });
}

}  // namespace trainrt::attention
