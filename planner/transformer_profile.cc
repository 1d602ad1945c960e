// Per layer and tensor rank, with e bytes an element and x = seq * micro_batch * hidden: two norms,
// QKV product, attention (s x s products, or one fused kernel), projection, MLP of two or three
// products, and the element-wise kernels between. Saved tensors are those of Korthikanti et al.
// 2022, section 4.1: 10x outside the tensor-parallel parts (4 norm inputs, 4 product inputs, 2
// dropout masks), 24x/t inside, 5 a s^2 b / t for attention; without dropout the masks, and with
// fused attention the s x s part, fall away.
#include "planner/transformer_profile.h"

#include "graph/base/error.h"

namespace trainrt {

namespace {

class LayerWriter {
 public:
  LayerWriter(const TransformerShape& shape,
              const Engine& engine,
              int64_t micro_batch,
              int tensor_parallel,
              bool sequence_parallel,
              double element_bytes)
      : shape_(shape),
        engine_(engine),
        b_(micro_batch),
        t_(tensor_parallel),
        sp_(sequence_parallel && tensor_parallel > 1),
        e_(element_bytes) {}

  BlockClass layer() {
    const double x = tokens() * h();  // elements of the residual stream
    const double outside = sp_ ? x / t_ : x;
    norm(outside);
    column(qkv_width() / t_, h(), shape_.bias);
    if (shape_.gated) {
      rotary();
    }
    shape_.causal&& engine_.fused_attention ? fused_attention() : plain_attention();
    row(h(), h() / t_);
    residual(outside);
    norm(outside);
    column((shape_.gated ? 2 : 1) * f() / t_, h(), shape_.bias);
    activation();
    row(h(), f() / t_);
    residual(outside);
    fill_stash(x);
    select_recompute(x);
    block_.name = "layer";
    block_.output_bytes = e_ * x;
    // The MLP's input and output gradients at once.
    block_.transient_bytes = e_ * tokens() * ((shape_.gated ? 4 : 2) * f() / t_ + 2 * h());
    return std::move(block_);
  }

  BlockClass embedding() {
    const double x = tokens() * h();
    block_.name = "embedding";
    block_.recomputed = false;
    block_.parameters = v() / t_ * h();
    block_.forward.stream(2 * e_ * x);
    if (t_ > 1) {
      block_.forward.collective(sp_ ? Collective::kReduceScatter : Collective::kAllReduce, e_ * x);
    }
    if (shape_.dropout) {
      block_.forward.stream(masked() * x / (sp_ ? t_ : 1));
      block_.weight_grad.stream(masked() * x / (sp_ ? t_ : 1));
    }
    block_.weight_grad.stream(3 * e_ * x);
    block_.output_bytes = e_ * x;
    block_.stash_bytes = {x, x, x};
    return std::move(block_);
  }

  BlockClass head() {
    const double x = tokens() * h();
    block_.name = "head";
    block_.recomputed = false;
    norm(sp_ ? x / t_ : x);
    column(v() / t_, h(), false);
    if (shape_.tied_head) {
      block_.shared_parameters = v() / t_ * h();
    }
    const double logits = tokens() * v() / t_;
    double kept = 6 * logits;
    if (engine_.fused_loss) {  // maximum and sum from the logits, their gradient in their place
      kept = e_ * logits;
      block_.forward.stream(e_ * logits);
      block_.forward.stream(e_ * logits);
      block_.input_grad.stream(2 * e_ * logits);
    } else {  // a copy in fp32: cast, maximum, exponential and sum, division; backward one pass
      block_.forward.stream((e_ + 4) * logits);
      block_.forward.stream(4 * logits);
      block_.forward.stream(12 * logits);
      block_.input_grad.stream(8 * logits);
      block_.input_grad.stream((4 + e_) * logits);
    }
    const double stash = (sp_ ? 2 * e_ * x / t_ : 2 * e_ * x) + kept;
    block_.stash_bytes = {stash, stash, stash};
    block_.transient_bytes = kept;
    return std::move(block_);
  }

 private:
  double h() const { return static_cast<double>(shape_.hidden); }
  double f() const { return static_cast<double>(shape_.ffn); }
  double s() const { return static_cast<double>(shape_.seq); }
  double v() const { return static_cast<double>(shape_.vocab); }
  double a() const { return static_cast<double>(shape_.heads); }
  double tokens() const { return s() * static_cast<double>(b_); }
  double head_dim() const { return h() / a(); }
  double qkv_width() const { return h() + 2 * static_cast<double>(shape_.kv_heads) * head_dim(); }

  static MatmulDims dims(double batch, double m, double n, double k) {
    return {static_cast<int64_t>(batch),
            static_cast<int64_t>(m),
            static_cast<int64_t>(n),
            static_cast<int64_t>(k)};
  }
  // Reads and writes an element and the byte of its dropout mask.
  double masked() const { return 2 * e_ + 1; }
  double matmul_bytes(const MatmulDims& d) const {
    return e_ * static_cast<double>(d.batch) *
           (static_cast<double>(d.m) * static_cast<double>(d.k) +
            static_cast<double>(d.k) * static_cast<double>(d.n) +
            static_cast<double>(d.m) * static_cast<double>(d.n));
  }
  void product(PhaseProfile* phase, const MatmulDims& d) const {
    phase->matmul(d, matmul_bytes(d));
  }

  // A fused kernel; RMSNorm written out in fp32 is seven: cast, square, mean, scale, cast, weight.
  void norm(double elements) {
    if (!engine_.fused_elementwise && shape_.gated) {
      for (const double bytes : {6, 8, 4, 8, 6, 4}) {
        block_.forward.stream(bytes * elements);
        block_.input_grad.stream(1.5 * bytes * elements);
      }
    } else {
      block_.forward.stream(2 * e_ * elements);
      block_.input_grad.stream(3 * e_ * elements);
    }
    block_.parameters += (shape_.bias ? 2 : 1) * h();
  }

  // n outputs per token from k inputs, on this rank. Gradients: dx = dy W^T, dW = x^T dy.
  void linear(double n, double k, bool bias) {
    product(&block_.forward, dims(1, tokens(), n, k));
    product(&block_.input_grad, dims(1, tokens(), k, n));
    product(&block_.weight_grad, dims(1, k, n, tokens()));
    // Accumulation into the gradient buffer: by the product itself, or by a pass of its own.
    if (engine_.fused_accumulation) {
      block_.weight_grad.kernels.back().cost.bytes += n * k * (2 * engine_.gradient_bytes - e_);
    } else {
      block_.weight_grad.stream(n * k * (2 * engine_.gradient_bytes + e_));
    }
    if (bias) {
      block_.weight_grad.stream(e_ * tokens() * n);
      block_.parameters += n;
    }
    block_.parameters += n * k;
  }

  // Input whole, output split over the tensor group: the input's gradient is a sum over it. Under
  // sequence parallelism the input is gathered, in backward once more for the weight gradient.
  void column(double n, double k, bool bias) {
    const double bytes = e_ * tokens() * k;
    linear(n, k, bias);
    if (t_ == 1) {
      return;
    }
    if (sp_) {
      block_.forward.collective(Collective::kAllGather, bytes);
      block_.input_grad.collective(Collective::kReduceScatter, bytes);
      hidden_gather(bytes);
    } else {
      block_.input_grad.collective(Collective::kAllReduce, bytes);
    }
  }

  // Megatron runs this gather beside the input-gradient product: it costs what the product does not
  // hide, which the compute slow-down of overlap stands for; the bytes are still moved through
  // memory.
  void hidden_gather(double bytes) { block_.input_grad.stream(2 * bytes / t_); }

  // Input split, output a sum over the tensor group.
  void row(double n, double k) {
    const double bytes = e_ * tokens() * n;
    linear(n, k, shape_.bias);
    if (t_ == 1) {
      return;
    }
    block_.forward.collective(sp_ ? Collective::kReduceScatter : Collective::kAllReduce, bytes);
    if (sp_) {
      block_.input_grad.collective(Collective::kAllGather, bytes);
    }
  }

  void plain_attention() {
    const double batch = static_cast<double>(b_) * a() / t_;
    const double scores = batch * s() * s();
    const double context = tokens() * h() / t_;
    for (PhaseProfile* phase : {&block_.forward, &block_.selective}) {
      product(phase, dims(batch, s(), s(), head_dim()));
      softmax(phase, scores, 2);
      if (shape_.dropout) {
        phase->stream(masked() * scores);
      }
      product(phase, dims(batch, s(), head_dim(), s()));
    }
    block_.forward.stream(2 * e_ * context);  // context to [tokens, hidden]
    block_.input_grad.stream(2 * e_ * context);
    product(&block_.input_grad, dims(batch, s(), s(), head_dim()));  // d probabilities
    product(&block_.input_grad, dims(batch, s(), head_dim(), s()));  // d value
    if (shape_.dropout) {
      block_.input_grad.stream(masked() * scores);
    }
    softmax(&block_.input_grad, scores, 3);
    product(&block_.input_grad, dims(batch, s(), head_dim(), s()));  // d query
    product(&block_.input_grad, dims(batch, s(), head_dim(), s()));  // d key
    block_.input_grad.stream(2 * e_ * context * qkv_width() / h());
  }

  // Megatron's kernel of scale, mask and softmax takes 16-bit numbers and a multiple of four heads
  // of the micro-batch; else mask and softmax are passes over the scores, and for 16-bit ones so
  // are a cast to fp32, the scale and the cast back. `tensors`: that the softmax reads and writes.
  void softmax(PhaseProfile* phase, double scores, double tensors) const {
    const bool fused = e_ == 2 && b_ * shape_.heads / t_ % 4 == 0;
    if (!fused && e_ == 2) {
      phase->stream(6 * scores);
      phase->stream(8 * scores);
      phase->stream(6 * scores);
    }
    const double element = fused ? e_ : 4;
    if (!fused) {
      phase->stream((2 * element + 1) * scores);
    }
    phase->stream(tensors * element * scores);
  }

  // One kernel; the causal half is skipped. Backward runs five products instead of two.
  void fused_attention() {
    const double batch = static_cast<double>(b_) * a() / t_;
    const double width = (shape_.causal ? 0.5 : 1) * s();
    const double bytes = e_ * tokens() * (qkv_width() + h()) / t_;
    Cost forward{0, bytes, {}}, backward{0, 3 * bytes, {}};
    for (int i = 0; i < 2; ++i) {
      forward.matmuls.push_back(dims(batch, s(), width, head_dim()));
    }
    for (int i = 0; i < 5; ++i) {
      backward.matmuls.push_back(dims(batch, s(), width, head_dim()));
    }
    block_.selective.kernel(forward, true);
    block_.forward.kernel(forward, true);
    block_.input_grad.kernel(backward, true);
  }

  void activation() {
    const double elements = tokens() * f() / t_;
    const double inputs = shape_.gated ? 2 : 1;
    block_.forward.stream(e_ * elements * (inputs + 1));
    block_.input_grad.stream(e_ * elements * (2 * inputs + 1));
    if (!engine_.fused_elementwise && shape_.gated) {  // SiLU and product apart
      block_.forward.stream(2 * e_ * elements);
      block_.input_grad.stream(3 * e_ * elements);
    }
  }

  // Rotary positions on query and key: one pass, or cast, complex product and cast.
  void rotary() {
    const double elements = tokens() * (qkv_width() + h()) / 2 / t_;
    if (engine_.fused_elementwise) {
      block_.forward.stream(2 * e_ * elements);
      block_.input_grad.stream(2 * e_ * elements);
      return;
    }
    for (const double bytes : {6, 20, 6}) {
      block_.forward.stream(bytes * elements);
      block_.input_grad.stream(bytes * elements);
    }
  }

  void residual(double elements) {
    block_.forward.stream((3 * e_ + (shape_.dropout ? 1 : 0)) * elements);
    if (shape_.dropout) {
      block_.input_grad.stream(masked() * elements);
    } else {
      block_.input_grad.stream(3 * e_ * elements);  // the two branches' gradients are added
    }
  }

  void fill_stash(double x) {
    const double outside = (4 * e_ + (shape_.dropout ? 2 : 0)) * (sp_ ? x / t_ : x);
    const double kv = qkv_width() / h();
    const double mlp = (shape_.gated ? 3 : 2) * e_ * tokens() * f() / t_;
    const double inside = e_ * (kv + 1) * x / t_ + mlp;
    const double scores = static_cast<double>(b_) * a() / t_ * s() * s();
    const double attention = engine_.fused_attention ? 4 * tokens() * a() / t_
                                                     : (shape_.dropout ? masked() : e_) * scores;
    block_.stash_bytes[0] = outside + inside + attention;
    block_.stash_bytes[1] = outside + inside;
    block_.stash_bytes[2] = e_ * (sp_ ? x / t_ : x);
  }

  // What other selections than the attention keep and run again.
  void select_recompute(double x) {
    if (engine_.selective != SelectiveRecompute::kEverySecondProduct) {
      return;
    }
    PhaseProfile again;
    for (const KernelProfile& kernel : block_.forward.kernels) {
      if (kernel.cost.matmuls.empty()) {
        again.kernels.push_back(kernel);
      }
    }
    for (const TensorCollective& c : block_.forward.collectives) {
      if (c.kind == Collective::kAllGather) {
        again.collectives.push_back(c);
      }
    }
    // Of query, key, value, attention's output, gate (or up), up and down products the second,
    // fourth and sixth; without a gate the last is the sixth, and nothing needs it.
    const double kv = (qkv_width() - h()) / 2 / t_;
    product(&again, dims(1, tokens(), kv, h()));
    product(&again, dims(1, tokens(), h(), h() / t_));
    if (shape_.gated) {
      product(&again, dims(1, tokens(), f() / t_, h()));
    }
    block_.selective = std::move(again);
    const double attention = e_ * x / t_ + (engine_.fused_attention ? 4 * tokens() * a() / t_
                                                                    : e_ * static_cast<double>(b_) *
                                                                          a() / t_ * s() * s());
    const double down = shape_.gated ? e_ * (sp_ ? x / t_ : x) : 0;
    block_.stash_bytes[1] = e_ * (sp_ ? x / t_ : x) + e_ * x / t_ + e_ * tokens() * kv + attention +
                            e_ * tokens() * f() / t_ + down;
  }

  const TransformerShape& shape_;
  const Engine& engine_;
  int64_t b_;
  int t_;
  bool sp_;
  double e_;  // bytes of an activation's element
  BlockClass block_;
};

}  // namespace

double transformer_model_flops(const TransformerShape& shape) {
  const double h = static_cast<double>(shape.hidden), s = static_cast<double>(shape.seq);
  const double kv = static_cast<double>(shape.kv_heads) * h / static_cast<double>(shape.heads);
  const double f = static_cast<double>(shape.ffn), g = shape.gated ? 3 : 2;
  return 3 * s *
         (static_cast<double>(shape.layers) *
              (2 * h * (h + 2 * kv) + 2 * h * h + 2 * h * f * g + 4 * s * h) +
          2 * h * static_cast<double>(shape.vocab));
}

double transformer_parameters(const TransformerShape& shape) {
  const Engine engine;
  const ModelProfile profile = transformer_profile(shape, engine, 1, 1, false);
  double sum = 0;
  for (const int index : profile.blocks) {
    const BlockClass& block = profile.classes[static_cast<size_t>(index)];
    sum += block.parameters - block.shared_parameters;
  }
  return sum;
}

ModelProfile transformer_profile(const TransformerShape& shape,
                                 const Engine& engine,
                                 int64_t micro_batch,
                                 int tensor_parallel,
                                 bool sequence_parallel,
                                 double element_bytes) {
  TRAINRT_REQUIRE(shape.layers > 0 && shape.hidden > 0 && shape.heads > 0 && shape.seq > 0,
                  kInvalidArgument,
                  "a Transformer needs layers, hidden, heads and seq");
  const auto writer = [&] {
    return LayerWriter(
        shape, engine, micro_batch, tensor_parallel, sequence_parallel, element_bytes);
  };
  ModelProfile profile;
  profile.micro_batch = micro_batch;
  profile.tensor_parallel = tensor_parallel;
  profile.sequence_parallel = sequence_parallel;
  profile.model_flops_per_sample = transformer_model_flops(shape);
  profile.tokens_per_sample = static_cast<double>(shape.seq);
  profile.scattered_transfers =
      tensor_parallel > 1 && (engine.scattered_transfers || sequence_parallel);
  profile.classes = {writer().embedding(), writer().layer(), writer().head()};
  profile.blocks.push_back(0);
  profile.blocks.insert(profile.blocks.end(), static_cast<size_t>(shape.layers), 1);
  profile.blocks.push_back(2);
  if (engine.selective == SelectiveRecompute::kEverySecondLayer) {
    BlockClass kept = profile.classes[1], recomputed = profile.classes[1];
    kept.selective = {};
    kept.stash_bytes[1] = kept.stash_bytes[0];
    recomputed.selective = recomputed.forward;
    recomputed.stash_bytes[1] = recomputed.stash_bytes[2];
    profile.classes[1] = kept;
    profile.classes.push_back(recomputed);
    for (size_t layer = 2; layer + 1 < profile.blocks.size(); layer += 2) {
      profile.blocks[layer] = 3;
    }
  }
  return profile;
}

}  // namespace trainrt
