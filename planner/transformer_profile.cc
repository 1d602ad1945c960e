// Per layer and tensor rank, with e = 2 bytes and x = seq * micro_batch * hidden: two norms, QKV
// product, attention (s x s products, or one fused kernel), projection, MLP of two or three
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
              bool sequence_parallel)
      : shape_(shape),
        engine_(engine),
        b_(micro_batch),
        t_(tensor_parallel),
        sp_(sequence_parallel && tensor_parallel > 1) {}

  BlockClass layer() {
    const double x = tokens() * h();  // elements of the residual stream
    const double outside = sp_ ? x / t_ : x;
    norm(outside);
    column(qkv_width() / t_, h());
    if (shape_.gated) {
      rotary();
    }
    shape_.causal&& engine_.fused_attention ? fused_attention() : plain_attention();
    row(h(), h() / t_);
    residual(outside);
    norm(outside);
    column((shape_.gated ? 2 : 1) * f() / t_, h());
    activation();
    row(h(), f() / t_);
    residual(outside);
    fill_stash(x);
    block_.name = "layer";
    block_.output_bytes = 2 * x;
    // The MLP's input and output gradients at once.
    block_.transient_bytes = 2 * tokens() * ((shape_.gated ? 4 : 2) * f() / t_ + 2 * h());
    return std::move(block_);
  }

  BlockClass embedding() {
    const double x = tokens() * h();
    block_.name = "embedding";
    block_.parameters = v() / t_ * h();
    block_.forward.stream(4 * x);
    if (t_ > 1) {
      block_.forward.collective(sp_ ? Collective::kReduceScatter : Collective::kAllReduce, 2 * x);
    }
    if (shape_.dropout) {
      block_.forward.stream(5 * x / (sp_ ? t_ : 1));
      block_.weight_grad.stream(5 * x / (sp_ ? t_ : 1));
    }
    block_.weight_grad.stream(6 * x);
    block_.output_bytes = 2 * x;
    block_.stash_bytes = {x, x, x};
    return std::move(block_);
  }

  BlockClass head() {
    const double x = tokens() * h();
    block_.name = "head";
    norm(sp_ ? x / t_ : x);
    column(v() / t_, h());
    if (shape_.tied_head) {
      block_.shared_parameters = v() / t_ * h();
    }
    // Loss on fp32 logits: cast, maximum, exponential and sum, division; backward one pass.
    const double logits = tokens() * v() / t_;
    block_.forward.stream(6 * logits);
    block_.forward.stream(4 * logits);
    block_.forward.stream(12 * logits);
    block_.input_grad.stream(8 * logits);
    block_.input_grad.stream(6 * logits);
    const double stash = (sp_ ? 4 * x / t_ : 4 * x) + 6 * logits;
    block_.stash_bytes = {stash, stash, stash};
    block_.transient_bytes = 6 * logits;
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
  static double matmul_bytes(const MatmulDims& d) {
    return 2.0 * static_cast<double>(d.batch) *
           (static_cast<double>(d.m) * static_cast<double>(d.k) +
            static_cast<double>(d.k) * static_cast<double>(d.n) +
            static_cast<double>(d.m) * static_cast<double>(d.n));
  }
  static void product(PhaseProfile* phase, const MatmulDims& d) {
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
      block_.forward.stream(4 * elements);
      block_.input_grad.stream(6 * elements);
    }
    block_.parameters += (shape_.bias ? 2 : 1) * h();
  }

  // n outputs per token from k inputs, on this rank. Gradients: dx = dy W^T, dW = x^T dy.
  void linear(double n, double k) {
    product(&block_.forward, dims(1, tokens(), n, k));
    product(&block_.input_grad, dims(1, tokens(), k, n));
    product(&block_.weight_grad, dims(1, k, n, tokens()));
    // Accumulation into the gradient buffer: by the product itself, or by a pass of its own.
    if (engine_.fused_accumulation) {
      block_.weight_grad.kernels.back().cost.bytes += n * k * (2 * engine_.gradient_bytes - 2);
    } else {
      block_.weight_grad.stream(n * k * (2 * engine_.gradient_bytes + 2));
    }
    if (shape_.bias) {
      block_.weight_grad.stream(2 * tokens() * n);
      block_.parameters += n;
    }
    block_.parameters += n * k;
  }

  // Input whole, output split over the tensor group: the input's gradient is a sum over it. Under
  // sequence parallelism the input is gathered, in backward once more for the weight gradient.
  void column(double n, double k) {
    const double bytes = 2 * tokens() * k;
    linear(n, k);
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
    const double bytes = 2 * tokens() * n;
    linear(n, k);
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
      phase->stream(4 * scores);
      if (shape_.dropout) {
        phase->stream(5 * scores);
      }
      product(phase, dims(batch, s(), head_dim(), s()));
    }
    block_.forward.stream(4 * context);  // context to [tokens, hidden]
    block_.input_grad.stream(4 * context);
    product(&block_.input_grad, dims(batch, s(), s(), head_dim()));  // d probabilities
    product(&block_.input_grad, dims(batch, s(), head_dim(), s()));  // d value
    if (shape_.dropout) {
      block_.input_grad.stream(5 * scores);
    }
    block_.input_grad.stream(6 * scores);
    product(&block_.input_grad, dims(batch, s(), head_dim(), s()));  // d query
    product(&block_.input_grad, dims(batch, s(), head_dim(), s()));  // d key
    block_.input_grad.stream(4 * context * qkv_width() / h());
  }

  // One kernel; the causal half is skipped. Backward runs five products instead of two.
  void fused_attention() {
    const double batch = static_cast<double>(b_) * a() / t_;
    const double width = (shape_.causal ? 0.5 : 1) * s();
    const double bytes = 2 * tokens() * (qkv_width() + h()) / t_;
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
    block_.forward.stream(2 * elements * (inputs + 1));
    block_.input_grad.stream(2 * elements * (2 * inputs + 1));
    if (!engine_.fused_elementwise && shape_.gated) {  // SiLU and product apart
      block_.forward.stream(4 * elements);
      block_.input_grad.stream(6 * elements);
    }
  }

  // Rotary positions on query and key: one pass, or cast, complex product and cast.
  void rotary() {
    const double elements = tokens() * (qkv_width() + h()) / 2 / t_;
    if (engine_.fused_elementwise) {
      block_.forward.stream(4 * elements);
      block_.input_grad.stream(4 * elements);
      return;
    }
    for (const double bytes : {6, 20, 6}) {
      block_.forward.stream(bytes * elements);
      block_.input_grad.stream(bytes * elements);
    }
  }

  void residual(double elements) {
    block_.forward.stream((shape_.dropout ? 7 : 6) * elements);
    if (shape_.dropout) {
      block_.input_grad.stream(5 * elements);
    } else {
      block_.input_grad.stream(6 * elements);  // the two branches' gradients are added
    }
  }

  void fill_stash(double x) {
    const double outside = (8 + (shape_.dropout ? 2 : 0)) * (sp_ ? x / t_ : x);
    const double kv = qkv_width() / h();
    const double mlp = (shape_.gated ? 3 : 2) * 2 * tokens() * f() / t_;
    const double inside = (2 * kv + 2) * x / t_ + mlp;
    const double scores = static_cast<double>(b_) * a() / t_ * s() * s();
    const double attention =
        engine_.fused_attention ? 4 * tokens() * a() / t_ : (shape_.dropout ? 5 : 2) * scores;
    block_.stash_bytes[0] = outside + inside + attention;
    block_.stash_bytes[1] = outside + inside;
    block_.stash_bytes[2] = 2 * (sp_ ? x / t_ : x);
  }

  const TransformerShape& shape_;
  const Engine& engine_;
  int64_t b_;
  int t_;
  bool sp_;
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
                                 bool sequence_parallel) {
  TRAINRT_REQUIRE(shape.layers > 0 && shape.hidden > 0 && shape.heads > 0 && shape.seq > 0,
                  kInvalidArgument,
                  "a Transformer needs layers, hidden, heads and seq");
  const auto writer = [&] {
    return LayerWriter(shape, engine, micro_batch, tensor_parallel, sequence_parallel);
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
  return profile;
}

}  // namespace trainrt
