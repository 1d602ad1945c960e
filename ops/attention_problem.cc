// What a node of FusedAttention asks for: sizes, where rows lie, which mask element belongs to
// which.
#include <algorithm>

#include "graph/shape.h"
#include "ops/attention.h"

namespace trainrt::attention {

namespace {

Layout layout_of(const Shape& head_major_shape, bool sequence_major) {
  const size_t ndim = head_major_shape.size();
  const int64_t heads = ndim > 2 ? head_major_shape[ndim - 3] : 1;
  const int64_t rows = head_major_shape[ndim - 2], width = head_major_shape[ndim - 1];
  return {heads * rows * width,
          sequence_major ? width : rows * width,
          sequence_major ? heads * width : width};
}

template <typename Context>
Problem make_problem(const Context& op) {
  const Attributes& attributes = op.attributes();
  const auto shape = [&](int input, Operand operand) {
    return head_major(op.input_shape(input), is_sequence_major(attributes, operand));
  };
  Problem p;
  const Shape q = shape(0, kQ), k = shape(1, kK), v = shape(2, kV);
  const int ndim = static_cast<int>(q.size());
  p.samples = dims_product(q, 0, ndim - 3);
  p.heads = ndim > 2 ? q[q.size() - 3] : 1;
  p.kv_heads = ndim > 2 ? k[k.size() - 3] : 1;
  p.sq = q[q.size() - 2];
  p.d = q.back();
  p.sk = k[k.size() - 2];
  p.e = v.back();
  p.q = layout_of(q, is_sequence_major(attributes, kQ));
  p.k = layout_of(k, is_sequence_major(attributes, kK));
  p.v = layout_of(v, is_sequence_major(attributes, kV));
  p.scale = attributes.get_float("scale", 1);
  p.causal = attributes.get_int("causal", 0) != 0;
  p.ratio = attributes.get_float("ratio", 0);
  p.probabilities = q;
  p.probabilities.back() = p.e;
  p.y = layout_of(p.probabilities, is_sequence_major(attributes, kY));
  p.probabilities.back() = p.sk;
  p.has_mask = op.has_input(kMaskInput);
  if (p.has_mask) {
    p.mask_strides = broadcast_strides(op.input_shape(kMaskInput), p.probabilities);
  }
  return p;
}

}  // namespace

bool is_sequence_major(const Attributes& attributes, Operand operand) {
  const std::vector<int64_t> flags = attributes.get_ints("sequence_major", {0, 0, 0, 0});
  return flags.at(operand) != 0;
}

Shape head_major(Shape shape, bool sequence_major) {
  if (sequence_major) {
    std::swap(shape.at(shape.size() - 3), shape[shape.size() - 2]);
  }
  return shape;
}

int64_t Problem::mask_offset(int64_t index, int64_t i) const {
  int64_t offset = i * mask_strides[mask_strides.size() - 2];
  for (size_t axis = probabilities.size() - 2; axis-- > 0;) {
    offset += index % probabilities[axis] * mask_strides[axis];
    index /= probabilities[axis];
  }
  return offset;
}

bool Problem::mask_varies_by_head() const {
  return heads == 1 || mask_strides[mask_strides.size() - 3] != 0;
}

bool Problem::mask_varies_by_sample() const {
  for (size_t axis = 0; axis + 3 < probabilities.size(); ++axis) {
    if (probabilities[axis] > 1 && mask_strides[axis] == 0) {
      return false;
    }
  }
  return true;
}

Problem problem_of(const OpContext& op) {
  return make_problem(op);
}
Problem problem_of(const KernelContext& op) {
  return make_problem(op);
}

uint32_t drop_limit(double ratio) {
  return static_cast<uint32_t>(std::min(ratio * 0x1p32, 4294967295.0));
}

}  // namespace trainrt::attention
