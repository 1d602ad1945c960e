// FusedAttention: y = dropout(softmax(scale q k^T [+ mask])) v, one operator, so that no tensor of
// [heads, queries, keys] exists.
//
//   FusedAttention(q[..., sq, d], k[..., sk, d], v[..., sk, e][, mask]) -> y[..., sq, e], lse[...,
//   sq] FusedAttentionGrad(q, k, v, mask, y, lse, dy[, dlse])               -> dq, dk, dv
//
// Attributes: scale; causal = 1: query i sees keys 0 ... i; ratio, and then those of
// ops/random_draw.h for the probabilities [..., sq, sk]. mask is added to the scaled scores and
// broadcasts; it gets no gradient. lse is the log of the sum of exponentials of a row's scores,
// from which the gradient finds the probabilities again. It is an output for the gradient's sake
// alone.
//
// Found by fusion (ops/attention_fusion.cc) in MatMul, Softmax, MatMul.
#include "ops/attention.h"

#include "graph/autodiff.h"
#include "graph/evaluator.h"
#include "ops/random_draw.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

using attention::kMaskInput;

TensorTypes infer_forward(const OpContext& op) {
  require_real(op);
  const Shape &q = op.input_shape(0), &k = op.input_shape(1), &v = op.input_shape(2);
  const bool fits = q.size() >= 2 && q.size() == k.size() && k.size() == v.size() &&
                    std::equal(q.begin(), q.end() - 2, k.begin()) &&
                    std::equal(k.begin(), k.end() - 1, v.begin()) && q.back() == k.back();
  TRAINRT_REQUIRE(fits,
                  kInvalidModel,
                  "FusedAttention wants q [..., sq, d], k [..., sk, d] and "
                  "v [..., sk, e], got ",
                  shape_string(q),
                  ", ",
                  shape_string(k),
                  ", ",
                  shape_string(v));
  if (op.has_input(kMaskInput)) {
    Shape scores = q;
    scores.back() = k[k.size() - 2];
    TRAINRT_REQUIRE(op.input_shape(kMaskInput).size() >= 2 &&
                        broadcast_shapes(op.input_shape(kMaskInput), scores) == scores,
                    kInvalidModel,
                    "FusedAttention: mask ",
                    shape_string(op.input_shape(kMaskInput)),
                    " does not broadcast to ",
                    shape_string(scores));
  }
  Shape y = q;
  y.back() = v.back();
  return {{op.input_dtype(0), y}, {op.input_dtype(0), {q.begin(), q.end() - 1}}};
}

TensorTypes infer_backward(const OpContext& op) {
  return {op.input_type(0), op.input_type(1), op.input_type(2)};
}

// Heads and samples are independent; queries and keys stay together.
ShardingRule sharding(const OpContext& op) {
  const bool grad = op.node().op_type == "FusedAttentionGrad";
  std::string mask;
  if (op.has_input(kMaskInput)) {
    const Shape& shape = op.input_shape(kMaskInput);
    mask = concat(
        ", ... ", shape[shape.size() - 2] == 1 ? "1" : "q", " ", shape.back() == 1 ? "1" : "k");
  } else if (op.num_inputs() > kMaskInput) {
    mask = ", _";
  }
  Factors factors(op,
                  grad ? concat("... q d, ... k d, ... k e",
                                mask,
                                ", ... q e, ... q, ... q e",
                                op.num_inputs() > 7 ? ", ... q" : "",
                                " -> ... q d, ... k d, ... k e")
                       : concat("... q d, ... k d, ... k e", mask, " -> ... q e, ... q"));
  factors.whole("q").whole("k").whole("d").whole("e");
  // y and dy enter the gradient through their product: it is not linear in dy alone.
  return factors;
}

// Draws belong to elements of the probabilities, whose leading dims are those of q.
Attributes localize(const OpContext& op, const FactorShard& shard) {
  Attributes attributes = op.attributes();
  if (attributes.get_float("ratio", 0) == 0) {
    return attributes;
  }
  const ShardingRule rule = sharding(op);
  const Shape whole = attention::problem_of(op).probabilities;
  Shape offsets = attributes.get_ints("offsets", Shape(whole.size(), 0));
  for (size_t d = 0; d + 2 < whole.size(); ++d) {
    if (rule.inputs[0][d] == DimFactors{shard.factor}) {
      offsets[d] += shard.offset;
    }
  }
  attributes.set("full_shape", attributes.get_ints("full_shape", whole));
  attributes.set("offsets", offsets);
  return attributes;
}

// Two products forward; backward makes the scores again and has four more.
Cost cost(const OpContext& op) {
  const attention::Problem p = attention::problem_of(op);
  const bool grad = op.node().op_type == "FusedAttentionGrad";
  Cost cost;
  cost.bytes = static_cast<double>(op.input_bytes() + op.output_bytes());
  cost.flops = static_cast<double>(p.heads) * static_cast<double>(p.sq) *
               static_cast<double>(p.sk) * (grad ? 16 : 8);
  cost.matmuls = {{p.heads, p.sq, p.sk, p.d}, {p.heads, p.sq, p.e, p.sk}};
  if (grad) {
    cost.matmuls = {{p.heads, p.sq, p.sk, p.d},
                    {p.heads, p.sq, p.sk, p.e},
                    {p.heads, p.sq, p.d, p.sk},
                    {p.heads, p.sk, p.d, p.sq},
                    {p.heads, p.sk, p.e, p.sq}};
  }
  return cost;
}

void gradient(GradientBuilder& g) {
  TRAINRT_REQUIRE(!g.needs_grad(kMaskInput),
                  kUnsupported,
                  "FusedAttention: the mask has no gradient; import with fusions off");
  const ValueId y = g.saved_output(0);
  std::vector<ValueId> inputs = {g.input(0),
                                 g.input(1),
                                 g.input(2),
                                 g.input(kMaskInput),
                                 y,
                                 g.saved_output(1),
                                 g.output_grad(0) == kNoValue ? g.zeros_like(y) : g.output_grad(0)};
  if (g.output_grad(1) != kNoValue) {
    inputs.push_back(g.output_grad(1));
  }
  const std::vector<ValueId> grads = g.node("FusedAttentionGrad", inputs, g.attributes());
  for (int i = 0; i < 3; ++i) {
    if (g.needs_grad(i)) {
      g.set_input_grad(i, grads[static_cast<size_t>(i)]);
    }
  }
}

std::vector<OpExample> examples() {
  const auto f32 = [](Shape shape) { return TensorType{DType::kFloat32, std::move(shape)}; };
  std::vector<OpExample> list;
  list.push_back({.name = "plain",
                  .attributes = {{"scale", 0.5}},
                  .inputs = {f32({2, 2, 6, 4}), f32({2, 2, 10, 4}), f32({2, 2, 10, 3})},
                  .values = {}});
  list.push_back({.name = "causal",
                  .attributes = {{"scale", 0.25}, {"causal", int64_t{1}}},
                  .inputs = {f32({2, 2, 70, 16}), f32({2, 2, 70, 16}), f32({2, 2, 70, 32})},
                  .values = {}});
  list.push_back(
      {.name = "masked_with_dropout",
       .attributes = {{"scale", 0.5},
                      {"ratio", 0.25},
                      {"rng_stream", int64_t{5}},
                      {"batch_axis", int64_t{0}},
                      {"rows_per_sample", int64_t{1}}},
       .inputs = {f32({2, 2, 6, 4}), f32({2, 2, 10, 4}), f32({2, 2, 10, 4}), f32({2, 1, 1, 10})},
       .values = {},
       .check_gradient = {0, 1, 2}});
  return list;
}

OpDef forward_op() {
  OpDef op;
  op.name = "FusedAttention";
  op.infer_types = infer_forward;
  op.cost = cost;
  op.sharding = sharding;
  op.localize = localize;
  op.reference_kernel = attention::forward_reference;
  op.gradient = gradient;
  op.random = true;  // with dropout; never merged then
  op.workspace = attention::forward_workspace;
  op.cpu_kernel = attention::forward_fast;
  op.examples = examples();
  return op;
}

// The gradient trusts y and lse, so its examples hold those of the forward operator.
std::vector<OpExample> grad_examples() {
  std::vector<OpExample> list;
  for (OpExample example : examples()) {
    if (example.attributes.has("ratio")) {
      continue;  // y would depend on the seed
    }
    Graph graph;
    GraphBuilder builder(graph);
    std::vector<ValueId> inputs;
    example.values.clear();
    for (const TensorType& type : example.inputs) {
      std::vector<float> values(static_cast<size_t>(num_elements(type.shape)));
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = static_cast<float>((i * 7919 + inputs.size() * 131) % 1009) / 504.5f - 1.0f;
      }
      example.values.push_back(Tensor::from(values, type.shape));
      inputs.push_back(builder.constant(example.values.back()));
    }
    const std::vector<ValueId> outputs = builder.node("FusedAttention", inputs, example.attributes);
    const std::vector<Tensor> results = evaluate(graph, {}, outputs);
    example.inputs.push_back({});  // no mask
    example.values.emplace_back();
    example.absent = {kMaskInput};
    for (const size_t i : {0u, 1u, 0u, 1u}) {  // y, lse, dy, dlse
      example.inputs.push_back(graph.value(outputs[i]).type);
      example.values.push_back(example.values.size() < 6 ? results[i] : Tensor());
    }
    list.push_back(std::move(example));
  }
  return list;
}

OpDef grad_op() {
  OpDef op;
  op.name = "FusedAttentionGrad";
  op.infer_types = infer_backward;
  op.cost = cost;
  op.sharding = sharding;
  op.localize = localize;
  op.reference_kernel = attention::backward_reference;
  op.random = true;
  op.workspace = attention::backward_workspace;
  op.cpu_kernel = attention::backward_fast;
  op.examples = grad_examples();
  return op;
}

const RegisterOp kForward{forward_op()};
const RegisterOp kBackward{grad_op()};

}  // namespace

}  // namespace trainrt
