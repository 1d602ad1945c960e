// Finds attention as exporters write it and makes it one FusedAttention:
//
//   MatMul(Dropout(Softmax(scores)), v)
//   scores: MatMul(q, k^T), scaled by constants before or after, plus a mask, in any order that
//   means scale q k^T + mask
//
// A mask that is 0 on and below the diagonal and hugely negative above, as a constant or as it is
// computed where that is too large to fold, or a Where on a constant lower triangle, becomes
// `causal`. Other masks stay inputs; trained ones (relative
// position biases) get their gradient. Heads of k and v repeated by Reshape, Expand, Reshape are
// read once (grouped-query attention), and transposes that only bring heads before the sequence are
// left to the operator (`sequence_major`).
#include "graph/op_def.h"
#include "graph/passes/fusion.h"

namespace trainrt {

namespace {

constexpr double kHuge = -1e4;  // what exporters write for minus infinity is below

struct Match {
  ValueId q = kNoValue, k = kNoValue, v = kNoValue, mask = kNoValue;
  std::vector<int64_t> k_permutation;  // makes [..., sk, d] of k; empty: it is that
  double scale = 1;
  bool causal = false;
  std::vector<int64_t> sequence_major = {0, 0, 0, 0};  // of q, k, v, y
  Attributes attributes;                               // of the dropout
};

const Node* producer(const FusionContext& f, ValueId value, const char* op_type) {
  const NodeId id = f.producer(value, op_type);
  return id == kNoNode ? nullptr : &f.graph().node(id);
}

// If `value` is x times or over a constant, returns x and joins the constant to `scale`.
ValueId strip_scale(const FusionContext& f, ValueId value, double& scale) {
  if (const Node* mul = producer(f, value, "Mul")) {
    for (const size_t i : {0u, 1u}) {
      if (const std::optional<double> constant = f.scalar_constant(mul->inputs[i])) {
        scale *= *constant;
        return mul->inputs[1 - i];
      }
    }
  }
  if (const Node* div = producer(f, value, "Div")) {
    if (const std::optional<double> constant = f.scalar_constant(div->inputs[1])) {
      scale /= *constant;
      return div->inputs[0];
    }
  }
  return kNoValue;
}

// Whether the constant holds, for every (i, j) of its last two dims, what `wanted(j > i, element)`
// accepts; its other dims must be 1.
template <typename Wanted>
bool is_triangle(const FusionContext& f, ValueId value, Wanted&& wanted) {
  const Value& constant = f.graph().value(value);
  const Shape& shape = constant.type.shape;
  if (constant.kind != ValueKind::kConstant || !constant.constant.defined() || shape.size() < 2 ||
      shape[shape.size() - 1] != shape[shape.size() - 2] ||
      num_elements(shape) != shape.back() * shape.back()) {
    return false;
  }
  const std::vector<double> elements = constant.constant.to_double();
  for (int64_t i = 0; i < shape.back(); ++i) {
    for (int64_t j = 0; j < shape.back(); ++j) {
      if (!wanted(j > i, elements[static_cast<size_t>(i * shape.back() + j)])) {
        return false;
      }
    }
  }
  return true;
}

// A Trilu of a tensor that is hugely negative everywhere.
bool is_cut_above(const FusionContext& f, ValueId value) {
  const Node* trilu = producer(f, value, "Trilu");
  const Node* fill = trilu == nullptr ? nullptr : producer(f, trilu->inputs[0], "Fill");
  const Shape shape = f.shape(value);
  return fill != nullptr && fill->attributes.get_float("value") <= kHuge &&
         trilu->attributes.get_int("upper") == 1 && trilu->attributes.get_int("k") == 1 &&
         shape[shape.size() - 1] == shape[shape.size() - 2] &&
         num_elements(shape) == shape.back() * shape.back();
}

// The product q k^T, where k^T may be a transpose that then disappears.
bool match_product(const FusionContext& f, const Node& matmul, Match& match) {
  if (matmul.attributes.get_int("trans_a", 0) != 0) {
    return false;
  }
  const bool transposed = matmul.attributes.get_int("trans_b", 0) != 0;
  match.q = matmul.inputs[0];
  match.k = matmul.inputs[1];
  for (ValueId* operand : {&match.q, &match.k}) {
    if (const ValueId x = strip_scale(f, *operand, match.scale); x != kNoValue) {
      *operand = x;
    }
  }
  if (transposed) {
    return true;
  }
  std::vector<int64_t> swap(static_cast<size_t>(f.ndim(match.k)));
  for (size_t d = 0; d < swap.size(); ++d) {
    swap[d] = static_cast<int64_t>(d);
  }
  const std::vector<int64_t> identity = swap;
  if (const Node* transpose = producer(f, match.k, "Transpose")) {
    swap = transpose->attributes.get_ints("perm");
    match.k = transpose->inputs[0];
    if (const ValueId x = strip_scale(f, match.k, match.scale); x != kNoValue) {
      match.k = x;
    }
  }
  std::swap(swap[swap.size() - 1], swap[swap.size() - 2]);
  if (swap != identity) {
    match.k_permutation = swap;
  }
  return true;
}

// Walks from the softmax's input to the product.
bool match_scores(const FusionContext& f, ValueId value, Match& match);

bool match_added_mask(const FusionContext& f, const Node& add, Match& match) {
  for (const size_t i : {0u, 1u}) {
    const ValueId mask = add.inputs[1 - i];
    Match attempt = match;
    if (f.shape(add.inputs[i]) != f.shape(add.outputs[0]) || f.ndim(mask) < 2) {
      continue;
    }
    if (is_cut_above(f, mask) ||
        is_triangle(f, mask, [](bool above, double x) { return above ? x <= kHuge : x == 0; })) {
      attempt.causal = true;
    } else if (match.mask == kNoValue && match.scale == 1) {
      attempt.mask = mask;
    } else {
      continue;
    }
    if (match_scores(f, add.inputs[i], attempt)) {
      match = attempt;
      return true;
    }
  }
  return false;
}

bool match_where(const FusionContext& f, const Node& where, Match& match) {
  for (const size_t kept : {1u, 2u}) {
    const std::optional<double> other = f.scalar_constant(where.inputs[3 - kept]);
    const bool keeps_if = kept == 1;
    if (other && *other <= kHuge && is_triangle(f, where.inputs[0], [&](bool above, double x) {
          return (x != 0) == (above != keeps_if);
        })) {
      match.causal = true;
      return match_scores(f, where.inputs[kept], match);
    }
  }
  return false;
}

bool match_scores(const FusionContext& f, ValueId value, Match& match) {
  if (!f.single_use(value)) {
    return false;
  }
  if (const NodeId matmul = f.producer(value, "MatMul"); matmul != kNoNode) {
    return match_product(f, f.graph().node(matmul), match);
  }
  if (const ValueId x = strip_scale(f, value, match.scale); x != kNoValue) {
    return match_scores(f, x, match);
  }
  if (const NodeId add = f.producer(value, "Add"); add != kNoNode) {
    return match_added_mask(f, f.graph().node(add), match);
  }
  if (const NodeId where = f.producer(value, "Where"); where != kNoNode) {
    return match_where(f, f.graph().node(where), match);
  }
  return false;
}

bool shapes_fit(const FusionContext& f, const Match& match) {
  const Shape q = f.shape(match.q), v = f.shape(match.v);
  Shape k = f.shape(match.k);
  for (size_t d = 0; d < match.k_permutation.size(); ++d) {
    k[d] = f.shape(match.k)[static_cast<size_t>(match.k_permutation[d])];
  }
  if (q.size() < 3 || q.size() != k.size() || q.size() != v.size() ||
      !std::equal(q.begin(), q.end() - 2, k.begin()) ||
      !std::equal(k.begin(), k.end() - 1, v.begin()) || q.back() != k.back()) {
    return false;
  }
  return !match.causal || q[q.size() - 2] == k[k.size() - 2];
}

// If `value` is [..., h, s, d] made of [..., g, s, d] by repeating each head h / g times in a row,
// returns the latter.
ValueId strip_repeated_heads(const FusionContext& f, ValueId value) {
  const Node* outer = producer(f, value, "Reshape");
  const Node* expand = outer == nullptr ? nullptr : producer(f, outer->inputs[0], "Expand");
  const Node* inner = expand == nullptr ? nullptr : producer(f, expand->inputs[0], "Reshape");
  if (inner == nullptr) {
    return kNoValue;
  }
  const ValueId heads = inner->inputs[0];
  const Shape from = f.shape(heads);
  if (from.size() < 3) {
    return kNoValue;
  }
  const auto head = from.end() - 3;  // what follows it is kept
  const auto with = [&](const Shape& middle) {
    Shape shape(from.begin(), head);
    shape.insert(shape.end(), middle.begin(), middle.end());
    shape.insert(shape.end(), head + 1, from.end());
    return shape;
  };
  const Shape wide = f.shape(expand->outputs[0]);
  const int64_t repeats = wide.size() == from.size() + 1 ? wide[from.size() - 2] : 0;
  const bool matches = f.shape(expand->inputs[0]) == with({*head, 1}) &&
                       wide == with({*head, repeats}) && f.shape(value) == with({*head * repeats});
  return matches ? heads : kNoValue;
}

// A permutation that swaps the heads and the sequence: [..., a, b, width] -> [..., b, a, width].
bool swaps_heads(const std::vector<int64_t>& permutation) {
  const size_t ndim = permutation.size();
  for (size_t d = 0; d < ndim; ++d) {
    const size_t wanted = d + 3 == ndim ? d + 1 : (d + 2 == ndim ? d - 1 : d);
    if (permutation[d] != static_cast<int64_t>(wanted)) {
      return false;
    }
  }
  return ndim >= 3;
}

// Reads through a transpose of heads and sequence.
void strip_transpose(const FusionContext& f, ValueId& value, int64_t& sequence_major) {
  const Node* transpose = producer(f, value, "Transpose");
  if (transpose != nullptr && swaps_heads(transpose->attributes.get_ints("perm"))) {
    value = transpose->inputs[0];
    sequence_major = 1;
  }
}

// Brings the operands to the forms that the operator reads by itself.
void simplify_operands(FusionContext& f, Match& match) {
  if (match.k_permutation.empty()) {
    const ValueId k = strip_repeated_heads(f, match.k), v = strip_repeated_heads(f, match.v);
    if (k != kNoValue && v != kNoValue && f.shape(k).end()[-3] == f.shape(v).end()[-3]) {
      match.k = k;
      match.v = v;
    }
    strip_transpose(f, match.k, match.sequence_major[1]);
  } else if (swaps_heads(match.k_permutation)) {
    match.sequence_major[1] = 1;
  } else {
    match.k = f.transpose(match.k, match.k_permutation);
  }
  strip_transpose(f, match.q, match.sequence_major[0]);
  strip_transpose(f, match.v, match.sequence_major[2]);
}

bool fuse(FusionContext& f) {
  const Node root = f.graph().node(f.root());
  if (root.attributes.get_int("trans_a", 0) != 0 || root.attributes.get_int("trans_b", 0) != 0) {
    return false;
  }
  Match match;
  match.v = root.inputs[1];
  ValueId probabilities = root.inputs[0];
  if (!f.single_use(probabilities)) {
    return false;
  }
  if (const Node* dropout = producer(f, probabilities, "Dropout")) {
    if (dropout->attributes.get_int("with_mask", 0) != 0) {
      return false;
    }
    match.attributes = dropout->attributes;
    probabilities = dropout->inputs[0];
  }
  const Node* softmax = producer(f, probabilities, "Softmax");
  if (softmax == nullptr || !f.single_use(probabilities) ||
      normalize_axis(softmax->attributes.get_int("axis", -1), f.ndim(probabilities)) !=
          f.ndim(probabilities) - 1) {
    return false;
  }
  if (!match_scores(f, softmax->inputs[0], match) || !shapes_fit(f, match)) {
    return false;
  }
  simplify_operands(f, match);
  Attributes attributes = match.attributes;
  attributes.set("scale", match.scale);
  if (match.causal) {
    attributes.set("causal", int64_t{1});
  }
  if (match.sequence_major != std::vector<int64_t>{0, 0, 0, 0}) {
    attributes.set("sequence_major", match.sequence_major);
  }
  std::vector<ValueId> inputs = {match.q, match.k, match.v};
  if (match.mask != kNoValue) {  // of files stored in 16 bits, too, it is wide
    const DType dtype = f.graph().value(match.mask).type.dtype;
    inputs.push_back(dtype_bytes(dtype) == 2
                         ? f.op("Cast", {match.mask}, {{"to", std::string("float32")}})
                         : match.mask);
  }
  f.replace(root.outputs[0], f.op("FusedAttention", inputs, attributes));
  return true;
}

// Transpose(FusedAttention) that swaps heads and sequence: y is written that way at once.
bool fuse_output(FusionContext& f) {
  const Node root = f.graph().node(f.root());
  const Node* found = producer(f, root.inputs[0], "FusedAttention");
  if (found == nullptr || !f.single_use(root.inputs[0]) ||
      !swaps_heads(root.attributes.get_ints("perm"))) {
    return false;
  }
  const Node attention = *found;
  Attributes attributes = attention.attributes;
  std::vector<int64_t> flags = attributes.get_ints("sequence_major", {0, 0, 0, 0});
  flags[3] = 1 - flags[3];
  attributes.set("sequence_major", flags);
  f.replace(root.outputs[0], f.op("FusedAttention", attention.inputs, attributes));
  return true;
}

const RegisterFusion kAttention{{"FusedAttention", "MatMul", 40, fuse}};
const RegisterFusion kAttentionOutput{{"transposed FusedAttention", "Transpose", 39, fuse_output}};

}  // namespace

}  // namespace trainrt
