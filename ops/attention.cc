// FusedAttention: y = dropout(softmax(scale q k^T [+ mask])) v, one operator, so that no tensor of
// [heads, queries, keys] exists.
//
//   FusedAttention(q[..., h, sq, d], k[..., g, sk, d], v[..., g, sk, e][, mask])
//       -> y[..., h, sq, e], lse[..., h, sq]
//   FusedAttentionGrad(q, k, v, mask, y, lse, dy[, dlse]) -> dq, dk, dv[, dmask]
//
// The g heads of k and v are shared by h / g consecutive heads of q each (grouped-query attention,
// arXiv 2305.13245). Attributes: scale; causal = 1: query i sees keys 0 ... i; ratio, and then
// those of ops/random_draw.h for the probabilities [..., h, sq, sk]; sequence_major, a flag for
// each of q, k, v and y (and so their gradients): 1 where the tensor lies as [..., sequence, heads,
// width], as projections leave it. mask is added to the scaled scores and broadcasts; it is float32
// at least, for 16 bits round the lowest of float32 to minus infinity and a row that is hidden
// altogether to NaN. lse is the log of the sum of exponentials of a row's scores, float32 at least,
// from which the gradient finds the probabilities again. It is an output for the gradient's sake
// alone. Of a row hidden altogether it has not the digits to tell how many keys there are, so
// under a mask the gradient makes probabilities add up to one.
//
// Found by fusion (ops/attention_fusion.cc) in MatMul, Softmax, MatMul.
#include "ops/attention.h"

#include <algorithm>

#include "graph/autodiff.h"
#include "graph/evaluator.h"
#include "ops/random_draw.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

using attention::kMaskInput;

bool are_shapes_compatible(const Shape& q, const Shape& k, const Shape& v) {
  const size_t ndim = q.size();
  if (ndim < 2 || k.size() != ndim || v.size() != ndim || q.back() != k.back() ||
      !std::equal(k.begin(), k.end() - 1, v.begin())) {
    return false;
  }
  return ndim == 2 || (std::equal(q.begin(), q.end() - 3, k.begin()) && k[ndim - 3] > 0 &&
                       q[ndim - 3] % k[ndim - 3] == 0);
}

TensorTypes infer_forward(const OpContext& op) {
  require_real(op);
  const Attributes& attributes = op.attributes();
  Shape shapes[3];
  for (const attention::Operand i : {attention::kQ, attention::kK, attention::kV}) {
    const bool sequence_major = is_sequence_major(attributes, i);
    shapes[i] = op.input_shape(i).size() > (sequence_major ? 2 : 0)
                    ? attention::head_major(op.input_shape(i), sequence_major)
                    : Shape{};
  }
  const auto& [q, k, v] = shapes;
  TRAINRT_REQUIRE(are_shapes_compatible(q, k, v),
                  kInvalidModel,
                  "FusedAttention wants q [..., h, sq, d], k [..., g, sk, d] and "
                  "v [..., g, sk, e], got ",
                  shape_string(op.input_shape(0)),
                  ", ",
                  shape_string(op.input_shape(1)),
                  ", ",
                  shape_string(op.input_shape(2)));
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
    TRAINRT_REQUIRE(op.input_dtype(kMaskInput) == statistic_dtype(op.input_dtype(0)),
                    kInvalidModel,
                    "FusedAttention: mask is ",
                    dtype_name(op.input_dtype(kMaskInput)),
                    " beside ",
                    dtype_name(op.input_dtype(0)),
                    " queries, wanted ",
                    dtype_name(statistic_dtype(op.input_dtype(0))));
  }
  Shape y = q;
  y.back() = v.back();
  return {
      {op.input_dtype(0), attention::head_major(y, is_sequence_major(attributes, attention::kY))},
      {statistic_dtype(op.input_dtype(0)), {q.begin(), q.end() - 1}}};
}

TensorTypes infer_backward(const OpContext& op) {
  TensorTypes types = {op.input_type(0), op.input_type(1), op.input_type(2)};
  if (op.has_input(kMaskInput)) {
    types.push_back(op.input_type(kMaskInput));
  }
  return types;
}

// The mask's dims as factors; those of size 1 are repeated.
std::string mask_factors(const OpContext& op, const std::string& heads) {
  const Shape& shape = op.input_shape(kMaskInput);
  const auto dim = [&](size_t from_end, const std::string& name) {
    return shape.size() < from_end ? "" : (shape[shape.size() - from_end] == 1 ? "1" : name) + " ";
  };
  return "... " + (heads.empty() ? "" : dim(3, heads)) + dim(2, "q") + dim(1, "k");
}

// Heads and samples are independent; queries and keys stay together.
ShardingRule sharding(const OpContext& op) {
  const attention::Problem p = attention::problem_of(op);
  const bool grad = op.node().op_type == "FusedAttentionGrad";
  const bool grouped = p.group() > 1;
  const std::string kv_heads = p.probabilities.size() < 3 ? "" : "g";
  const std::string heads = kv_heads.empty() ? "" : grouped ? "(g r)" : "g";
  const auto tensor = [&](attention::Operand operand, const char* rows, const char* width) {
    const bool of_queries = operand == attention::kQ || operand == attention::kY;
    const std::string& own = of_queries ? heads : kv_heads;
    return is_sequence_major(op.attributes(), operand) ? concat("... ", rows, " ", own, " ", width)
                                                       : concat("... ", own, " ", rows, " ", width);
  };
  const std::string q = tensor(attention::kQ, "q", "d"), k = tensor(attention::kK, "k", "d"),
                    v = tensor(attention::kV, "k", "e"), y = tensor(attention::kY, "q", "e"),
                    lse = concat("... ", heads, " q");
  const std::string mask = op.has_input(kMaskInput) ? mask_factors(op, heads) : "_";
  const std::string inputs =
      concat(q, ", ", k, ", ", v, op.num_inputs() > kMaskInput ? ", " + mask : "");
  Factors factors(op,
                  grad ? concat(inputs,
                                ", ",
                                y,
                                ", ",
                                lse,
                                ", ",
                                y,
                                op.num_inputs() > 7 ? ", " + lse : "",
                                " -> ",
                                q,
                                ", ",
                                k,
                                ", ",
                                v,
                                op.has_input(kMaskInput) ? ", " + mask : "")
                       : concat(inputs, " -> ", y, ", ", lse));
  factors.whole("q").whole("k").whole("d").whole("e");
  if (grouped) {
    factors.size("r", p.group()).whole("r");
  }
  if (grad && op.has_output(kMaskInput)) {  // summed over what the mask repeats
    const ShardingRule rule = factors;
    const TensorFactors& dmask = rule.outputs[kMaskInput];
    for (size_t f = 0; f < rule.factors.size(); ++f) {
      const bool varies = std::any_of(dmask.begin(), dmask.end(), [&](const DimFactors& dim) {
        return std::find(dim.begin(), dim.end(), static_cast<int>(f)) != dim.end();
      });
      if (!varies && rule.factors[f].kind == FactorKind::kParallel) {
        factors.reduction(rule.factors[f].name);
      }
    }
  }
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
  const attention::Problem p = attention::problem_of(op);
  const Shape& whole = p.probabilities;
  // lse has the dims of the probabilities but for the last.
  const TensorFactors& rows =
      op.node().op_type == "FusedAttentionGrad" ? rule.inputs[5] : rule.outputs[1];
  Shape offsets = attributes.get_ints("offsets", Shape(whole.size(), 0));
  for (size_t d = 0; d + 2 < whole.size(); ++d) {
    if (!rows[d].empty() && rows[d][0] == shard.factor) {
      offsets[d] += shard.offset * (rows[d].size() > 1 ? p.group() : 1);
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
  const int64_t heads = p.samples * p.heads;
  cost.flops = static_cast<double>(heads) * static_cast<double>(p.sq) * static_cast<double>(p.sk) *
               (grad ? 16 : 8);
  cost.matmuls = {{heads, p.sq, p.sk, p.d}, {heads, p.sq, p.e, p.sk}};
  if (grad) {
    cost.matmuls = {{heads, p.sq, p.sk, p.d},
                    {heads, p.sq, p.sk, p.e},
                    {heads, p.sq, p.d, p.sk},
                    {heads, p.sk, p.d, p.sq},
                    {heads, p.sk, p.e, p.sq}};
  }
  return cost;
}

void gradient(GradientBuilder& g) {
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
  for (size_t i = 0; i < grads.size(); ++i) {
    if (g.needs_grad(static_cast<int>(i))) {
      g.set_input_grad(static_cast<int>(i), grads[i]);
    }
  }
}

TensorType f32(Shape shape) {
  return {DType::kFloat32, std::move(shape)};
}

std::vector<OpExample> examples() {
  std::vector<OpExample> list;
  list.push_back({.name = "plain",
                  .attributes = {{"scale", 0.5}},
                  .inputs = {f32({2, 2, 6, 4}), f32({2, 2, 10, 4}), f32({2, 2, 10, 3})},
                  .values = {}});
  list.push_back({.name = "causal",
                  .attributes = {{"scale", 0.25}, {"causal", int64_t{1}}},
                  .inputs = {f32({2, 2, 70, 16}), f32({2, 2, 70, 16}), f32({2, 2, 70, 32})},
                  .values = {}});
  list.push_back({.name = "no_heads",
                  .attributes = {{"scale", 0.5}},
                  .inputs = {f32({6, 4}), f32({5, 4}), f32({5, 4})},
                  .values = {}});
  list.push_back({.name = "sequence_major",
                  .attributes = {{"scale", 0.25},
                                 {"causal", int64_t{1}},
                                 {"sequence_major", std::vector<int64_t>{1, 1, 1, 1}}},
                  .inputs = {f32({2, 37, 2, 16}), f32({2, 37, 2, 16}), f32({2, 37, 2, 32})},
                  .values = {}});
  list.push_back(
      {.name = "grouped_queries",
       .attributes = {{"scale", 0.25}, {"sequence_major", std::vector<int64_t>{0, 1, 0, 1}}},
       .inputs = {f32({2, 4, 6, 4}), f32({2, 7, 2, 4}), f32({2, 2, 7, 4})},
       .values = {}});
  list.push_back(
      {.name = "bias_per_head",
       .attributes = {{"scale", 0.5}},
       .inputs = {f32({2, 2, 6, 4}), f32({2, 2, 10, 4}), f32({2, 2, 10, 4}), f32({1, 2, 6, 10})},
       .values = {}});
  list.push_back(
      {.name = "masked_with_dropout",
       .attributes = {{"scale", 0.5},
                      {"ratio", 0.25},
                      {"rng_stream", int64_t{5}},
                      {"batch_axis", int64_t{0}},
                      {"rows_per_sample", int64_t{1}}},
       .inputs = {f32({2, 2, 6, 4}), f32({2, 2, 10, 4}), f32({2, 2, 10, 4}), f32({2, 1, 1, 10})},
       .values = {}});
  list.push_back(list.back());
  list.back().name = "grouped_with_dropout";
  list.back().inputs[1] = list.back().inputs[2] = f32({2, 1, 10, 4});
  return list;
}

OpDef forward_op() {
  OpDef op;
  op.name = "FusedAttention";
  op.precision = PrecisionRule::kLow;
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
    if (example.inputs.size() <= kMaskInput) {
      example.inputs.push_back({});
      example.values.emplace_back();
      example.absent = {kMaskInput};
    }
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
