// See ops/attention_cudnn.cuh. cuDNN recognises attention by its operations: these are the ones, in
// the order, that its documentation of fused attention gives.
#include <limits>

#include "ops/attention_cudnn.cuh"

namespace trainrt::attention {

namespace {

using cudnn::Graph;

// Of tensors: chunks of samples begin at such addresses.
constexpr int64_t kAlignment = 16;

// A graph in the making, with the shapes that its tensors have.
class Builder {
 public:
  Builder(const Problem& p, DType dtype, int64_t samples)
      : p_(p),
        type_(cudnn::data_type(dtype)),
        scores_{samples, p.heads, p.sq, p.sk},
        rows_{samples, p.heads, p.sq, 1} {}

  Graph& graph() { return graph_; }

  int64_t queries(const Layout& layout, int64_t width) {
    return graph_.tensor({scores_[0], p_.heads, p_.sq, width},
                         {layout.sample, layout.head, layout.row, 1},
                         type_,
                         kAlignment);
  }
  int64_t keys(const Layout& layout, int64_t width, bool transposed = false) {
    Shape dims = {scores_[0], p_.kv_heads, p_.sk, width};
    Shape strides = {layout.sample, layout.head, layout.row, 1};
    if (transposed) {
      std::swap(dims[2], dims[3]);
      std::swap(strides[2], strides[3]);
    }
    return graph_.tensor(dims, strides, type_, kAlignment);
  }
  int64_t row_values() {
    return graph_.tensor(rows_, row_major_strides(rows_), CUDNN_DATA_FLOAT, kAlignment);
  }

  int64_t scores(cudnnDataType_t type = CUDNN_DATA_FLOAT) { return graph_.inner(scores_, type); }
  int64_t rows() { return graph_.inner(rows_, CUDNN_DATA_FLOAT); }
  int64_t pointwise(cudnnPointwiseMode_t mode, const std::vector<int64_t>& inputs) {
    const int64_t y = scores();
    graph_.pointwise(mode, inputs, y);
    return y;
  }
  // The scores of keys after the query become `hidden`.
  int64_t causal(int64_t x, int64_t hidden) {
    const int64_t row = scores(CUDNN_DATA_INT32), column = scores(CUDNN_DATA_INT32),
                  visible = scores(CUDNN_DATA_BOOLEAN);
    graph_.pointwise(CUDNN_POINTWISE_GEN_INDEX, {x}, row, 2);
    graph_.pointwise(CUDNN_POINTWISE_GEN_INDEX, {x}, column, 3);
    graph_.pointwise(CUDNN_POINTWISE_CMP_GE, {row, column}, visible);
    return pointwise(CUDNN_POINTWISE_BINARY_SELECT, {x, hidden, visible});
  }
  // Scores as the left operand of a product over queries, in the tensors' type.
  int64_t transposed(int64_t x) {
    const int64_t y = graph_.inner({scores_[0], scores_[1], scores_[3], scores_[2]},
                                   type_,
                                   {p_.heads * p_.sq * p_.sk, p_.sq * p_.sk, 1, p_.sk});
    graph_.reshape(x, y);
    return y;
  }
  // A product over queries, for every query head, summed over those that share a head of keys.
  void to_keys(int64_t a, int64_t b, int64_t width, int64_t y) {
    if (p_.group() == 1) {
      graph_.matmul(a, b, y);
      return;
    }
    const int64_t all = graph_.inner({scores_[0], p_.heads, p_.sk, width}, type_);
    graph_.matmul(a, b, all);
    graph_.reduction(CUDNN_REDUCE_TENSOR_ADD, all, y);
  }

 private:
  const Problem& p_;
  cudnnDataType_t type_;
  Shape scores_, rows_;
  Graph graph_;
};

void expect(int64_t id, int64_t name) {
  TRAINRT_CHECK(id == name, "tensor ", id, " of an attention graph should be ", name);
}

}  // namespace

Graph forward_graph(const Problem& p, DType dtype, int64_t samples) {
  Builder b(p, dtype, samples);
  Graph& g = b.graph();
  const int64_t q = b.queries(p.q, p.d), k = b.keys(p.k, p.d, true), v = b.keys(p.v, p.e),
                y = b.queries(p.y, p.e), lse = b.row_values(), scale = g.scalar(4),
                hidden = g.scalar(4);
  expect(hidden, kFwdHidden);
  const int64_t products = b.scores();
  g.matmul(q, k, products);
  int64_t s = b.pointwise(CUDNN_POINTWISE_MUL, {products, scale});
  if (p.causal) {
    s = b.causal(s, hidden);
  }
  const int64_t max = b.rows(), sum = b.rows(), log = b.rows();
  g.reduction(CUDNN_REDUCE_TENSOR_MAX, s, max);
  const int64_t e = b.pointwise(CUDNN_POINTWISE_EXP, {b.pointwise(CUDNN_POINTWISE_SUB, {s, max})});
  g.reduction(CUDNN_REDUCE_TENSOR_ADD, e, sum);
  g.pointwise(CUDNN_POINTWISE_LOG, {sum}, log);
  g.pointwise(CUDNN_POINTWISE_ADD, {max, log}, lse);
  const int64_t probabilities = b.scores(cudnn::data_type(dtype));
  g.pointwise(CUDNN_POINTWISE_DIV, {e, sum}, probabilities);
  g.matmul(probabilities, v, y);
  return std::move(g);
}

Graph backward_graph(const Problem& p, DType dtype, int64_t samples) {
  Builder b(p, dtype, samples);
  Graph& g = b.graph();
  const int64_t q = b.queries(p.q, p.d), k = b.keys(p.k, p.d, true), v = b.keys(p.v, p.e, true),
                y = b.queries(p.y, p.e), lse = b.row_values(), dy = b.queries(p.y, p.e),
                dq = b.queries(p.q, p.d), dk = b.keys(p.k, p.d), dv = b.keys(p.v, p.e),
                row_sums = b.row_values();
  const Shape dq_dims = {samples, p.heads, p.sq, p.d};
  const int64_t dq_sums =
                    g.tensor(dq_dims, row_major_strides(dq_dims), CUDNN_DATA_FLOAT, kAlignment),
                scale = g.scalar(4), one = g.scalar(4), hidden = g.scalar(4);
  expect(hidden, kBwdHidden);

  // Sums of y dy: the part of the softmax's gradient that is the same for all keys.
  const int64_t products = g.inner({samples, p.heads, p.sq, p.e}, CUDNN_DATA_FLOAT);
  g.pointwise(CUDNN_POINTWISE_MUL, {dy, y}, products);
  const int64_t sums = b.rows();
  g.reduction(CUDNN_REDUCE_TENSOR_ADD, products, sums);
  g.pointwise(CUDNN_POINTWISE_MUL, {sums, one}, row_sums);

  // Probabilities again, and dv.
  const int64_t raw = b.scores();
  g.matmul(q, k, raw);
  int64_t s = b.pointwise(CUDNN_POINTWISE_MUL, {raw, scale});
  s = b.pointwise(CUDNN_POINTWISE_SUB, {s, lse});
  if (p.causal) {
    s = b.causal(s, hidden);
  }
  const int64_t probabilities = b.pointwise(CUDNN_POINTWISE_EXP, {s});
  b.to_keys(b.transposed(probabilities), dy, p.e, dv);

  // Gradients of the scores, dk and dq.
  int64_t ds = b.scores();
  g.matmul(dy, v, ds);
  ds = b.pointwise(CUDNN_POINTWISE_SUB, {ds, row_sums});
  ds = b.pointwise(CUDNN_POINTWISE_MUL, {ds, probabilities});
  ds = b.pointwise(CUDNN_POINTWISE_MUL, {ds, scale});
  b.to_keys(b.transposed(ds), q, p.d, dk);
  const int64_t keys = g.inner({samples, p.kv_heads, p.sk, p.d},
                               cudnn::data_type(dtype),
                               {p.k.sample, p.k.head, p.k.row, 1});
  g.reshape(k, keys);
  g.matmul(ds, keys, dq_sums);
  g.pointwise(CUDNN_POINTWISE_IDENTITY, {dq_sums}, dq);
  return std::move(g);
}

FusedAttention::FusedAttention(const OpContext& op, const Problem& p, const FusedScratch& cut)
    : problem_(p),
      cut_(cut),
      dtype_(op.input_dtype(0)),
      backward_(op.node().op_type == "FusedAttentionGrad") {}

bool FusedAttention::run(KernelContext& context) {
  // Engines add dq up in any order, and cuDNN does not note that of them.
  if (backward_ && cuda_context(context).deterministic()) {
    return false;
  }
  for (int64_t first = 0; first < problem_.samples; first += cut_.samples) {
    if (!run_samples(context, first, std::min(cut_.samples, problem_.samples - first))) {
      return false;
    }
  }
  return true;
}

std::string FusedAttention::why_not(const CudaContext& context) const {
  return backward_ && context.deterministic()
             ? "cuDNN's fused gradient adds in any order, which --deterministic forbids"
             : refused_->why_not();
}

bool FusedAttention::run_samples(KernelContext& context, int64_t first, int64_t count) {
  const Problem& p = problem_;
  auto at = graphs_.find(count);
  if (at == graphs_.end()) {
    const auto layout = [](const Layout& l) { return concat(l.sample, ",", l.head, ",", l.row); };
    at = graphs_
             .emplace(count,
                      cudnn::PlannedGraph(
                          concat(context.node().op_type,
                                 " ",
                                 dtype_name(dtype_),
                                 p.causal ? " causal " : " ",
                                 shape_string({count, p.heads, p.kv_heads, p.sq, p.sk, p.d, p.e}),
                                 layout(p.q),
                                 ";",
                                 layout(p.k),
                                 ";",
                                 layout(p.v),
                                 ";",
                                 layout(p.y)),
                          dtype_))
             .first;
  }
  const auto part = [&](const void* data, const Layout& layout) -> const void* {
    return static_cast<const std::byte*>(data) + first * layout.sample * dtype_bytes(dtype_);
  };
  const auto rows = [&](const void* data) -> const void* {
    return static_cast<const float*>(data) + first * p.heads * p.sq;
  };
  const float scale = static_cast<float>(p.scale), one = 1,
              hidden = -std::numeric_limits<float>::infinity();
  const std::span<std::byte> workspace = context.workspace();
  CudaContext& cuda = cuda_context(context);
  const auto run = [&](const std::function<Graph()>& build,
                       const cudnn::PlannedGraph::Pointers& pointers,
                       std::span<std::byte> room) {
    const bool ran = at->second.run(cuda, build, pointers, room);
    refused_ = ran ? nullptr : &at->second;
    return ran;
  };
  if (!backward_) {
    return run([&] { return forward_graph(p, dtype_, count); },
               {{kFwdQ, part(context.raw_input(0), p.q)},
                {kFwdK, part(context.raw_input(1), p.k)},
                {kFwdV, part(context.raw_input(2), p.v)},
                {kFwdY, part(context.raw_output(0), p.y)},
                {kFwdLse, rows(context.raw_output(1))},
                {kFwdScale, &scale},
                {kFwdHidden, &hidden}},
               workspace);
  }
  std::byte* const row_sums = workspace.data();
  std::byte* const dq_sums = row_sums + cut_.row_sums;
  return run([&] { return backward_graph(p, dtype_, count); },
             {{kBwdQ, part(context.raw_input(0), p.q)},
              {kBwdK, part(context.raw_input(1), p.k)},
              {kBwdV, part(context.raw_input(2), p.v)},
              {kBwdY, part(context.raw_input(4), p.y)},
              {kBwdLse, rows(context.raw_input(5))},
              {kBwdDy, part(context.raw_input(6), p.y)},
              {kBwdDq, part(context.raw_output(0), p.q)},
              {kBwdDk, part(context.raw_output(1), p.k)},
              {kBwdDv, part(context.raw_output(2), p.v)},
              {kBwdRowSums, row_sums},
              {kBwdDqSums, dq_sums},
              {kBwdScale, &scale},
              {kBwdOne, &one},
              {kBwdHidden, &hidden}},
             workspace.subspan(static_cast<size_t>(cut_.row_sums + cut_.dq_sums)));
}

}  // namespace trainrt::attention
