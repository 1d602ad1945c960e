// Finds LayerNormalization and RMSNormalization in the small operators that exporters write them
// in:
//
//   d = x - ReduceMean(x);  y = d / Sqrt(ReduceMean(d^2) + epsilon) [* scale] [+ bias]
//   y = x / Sqrt(ReduceMean(x^2) + epsilon) [* scale]
//
// with Pow or Mul for the square, and Div, Reciprocal or Pow(-0.5) for the quotient. The means run
// over the last dims, which scale and bias span.
#include <cmath>

#include "graph/op_def.h"
#include "graph/passes/fusion.h"

namespace trainrt {

namespace {

const Node* producer(const FusionContext& f, ValueId value, const char* op_type) {
  const NodeId id = f.producer(value, op_type);
  return id == kNoNode ? nullptr : &f.graph().node(id);
}

// The first of the trailing dims that a ReduceMean with keepdims runs over; -1 if it is none.
int mean_axis(const FusionContext& f, const Node& mean) {
  const int ndim = f.ndim(mean.inputs[0]);
  std::vector<bool> reduced(static_cast<size_t>(ndim), false);
  for (const int64_t axis : mean.attributes.get_ints("axes", {})) {
    reduced[static_cast<size_t>(normalize_axis(axis, ndim))] = true;
  }
  int first = ndim;
  while (first > 0 && reduced[static_cast<size_t>(first - 1)]) {
    --first;
  }
  for (int d = 0; d < first; ++d) {
    if (reduced[static_cast<size_t>(d)]) {
      return -1;
    }
  }
  return first < ndim && mean.attributes.get_int("keepdims", 1) != 0 ? first : -1;
}

// x if `value` is x^2.
ValueId square_root_of(const FusionContext& f, ValueId value) {
  if (const Node* mul = producer(f, value, "Mul")) {
    return mul->inputs[0] == mul->inputs[1] ? mul->inputs[0] : kNoValue;
  }
  const Node* pow = producer(f, value, "Pow");
  return pow != nullptr && f.scalar_constant(pow->inputs[1]) == 2.0 ? pow->inputs[0] : kNoValue;
}

// `value` as Sqrt(ReduceMean(d^2) + epsilon).
struct Deviation {
  ValueId d = kNoValue;
  int axis = -1;
  double epsilon = 0;
};

bool match_variance(const FusionContext& f, ValueId value, Deviation& found) {
  const Node* add = producer(f, value, "Add");
  if (add == nullptr) {
    return false;
  }
  for (const size_t i : {0u, 1u}) {
    const std::optional<double> epsilon = f.scalar_constant(add->inputs[1 - i]);
    const Node* mean = producer(f, add->inputs[i], "ReduceMean");
    if (!epsilon || mean == nullptr) {
      continue;
    }
    found = {square_root_of(f, mean->inputs[0]), mean_axis(f, *mean), *epsilon};
    return found.d != kNoValue && found.axis >= 0;
  }
  return false;
}

bool match_deviation(const FusionContext& f, ValueId value, Deviation& found) {
  const Node* sqrt = producer(f, value, "Sqrt");
  return sqrt != nullptr && match_variance(f, sqrt->inputs[0], found);
}

// 1 / Sqrt(...).
bool match_inverse(const FusionContext& f, ValueId value, Deviation& found) {
  if (const Node* reciprocal = producer(f, value, "Reciprocal")) {
    return match_deviation(f, reciprocal->inputs[0], found);
  }
  if (const Node* div = producer(f, value, "Div")) {
    return f.scalar_constant(div->inputs[0]) == 1.0 && match_deviation(f, div->inputs[1], found);
  }
  const Node* pow = producer(f, value, "Pow");
  return pow != nullptr && f.scalar_constant(pow->inputs[1]) == -0.5 &&
         match_variance(f, pow->inputs[0], found);
}

// `value` as d / Sqrt(ReduceMean(d^2) + epsilon).
bool match_quotient(const FusionContext& f, ValueId value, Deviation& found) {
  if (const Node* div = producer(f, value, "Div")) {
    return match_deviation(f, div->inputs[1], found) && found.d == div->inputs[0];
  }
  if (const Node* mul = producer(f, value, "Mul")) {
    for (const size_t i : {0u, 1u}) {
      if (match_inverse(f, mul->inputs[1 - i], found) && found.d == mul->inputs[i]) {
        return true;
      }
    }
  }
  return false;
}

// x if d = x - ReduceMean(x) over the same dims.
ValueId centered_input(const FusionContext& f, const Deviation& found) {
  const Node* sub = producer(f, found.d, "Sub");
  if (sub == nullptr) {
    return kNoValue;
  }
  const Node* mean = producer(f, sub->inputs[1], "ReduceMean");
  return mean != nullptr && mean->inputs[0] == sub->inputs[0] && mean_axis(f, *mean) == found.axis
             ? sub->inputs[0]
             : kNoValue;
}

// Whether `value` spans exactly the dims of x from `axis` on, apart from leading 1s.
bool spans(const FusionContext& f, ValueId value, ValueId x, int axis) {
  const Shape all = f.shape(x);
  const Shape normalized(all.begin() + axis, all.end());
  Shape shape = f.shape(value);
  while (shape.size() > normalized.size() && shape.front() == 1) {
    shape.erase(shape.begin());
  }
  return shape == normalized;
}

// Emits the operator in place of `y`; scale and bias may be kNoValue.
bool emit(FusionContext& f, ValueId y, const Deviation& found, ValueId scale, ValueId bias) {
  const ValueId x = centered_input(f, found);
  const bool centered = x != kNoValue;
  if (!centered && bias != kNoValue) {
    return false;
  }
  const ValueId input = centered ? x : found.d;
  for (const ValueId parameter : {scale, bias}) {
    if (parameter != kNoValue && !spans(f, parameter, input, found.axis)) {
      return false;
    }
  }
  const Shape all = f.shape(input);
  const Shape normalized(all.begin() + found.axis, all.end());
  if (scale == kNoValue) {
    scale = f.fill(1, {f.dtype(input), normalized});
  }
  std::vector<ValueId> inputs = {input, f.reshape(scale, normalized)};
  if (bias != kNoValue) {
    inputs.push_back(f.reshape(bias, normalized));
  }
  f.replace(y,
            f.op(centered ? "LayerNormalization" : "RMSNormalization",
                 inputs,
                 {{"axis", int64_t{found.axis}}, {"epsilon", found.epsilon}}));
  return true;
}

// Splits a Mul into the normalized value and its scale.
bool match_scaled(const FusionContext& f, ValueId value, Deviation& found, ValueId& scale) {
  const Node* mul = producer(f, value, "Mul");
  if (mul == nullptr) {
    return false;
  }
  for (const size_t i : {0u, 1u}) {
    if (match_quotient(f, mul->inputs[i], found)) {
      scale = mul->inputs[1 - i];
      return true;
    }
  }
  return false;
}

bool fuse_with_bias(FusionContext& f) {
  const Node root = f.graph().node(f.root());
  for (const size_t i : {0u, 1u}) {
    Deviation found;
    ValueId scale = kNoValue;
    if (match_scaled(f, root.inputs[i], found, scale)) {
      return emit(f, root.outputs[0], found, scale, root.inputs[1 - i]);
    }
  }
  return false;
}

bool fuse_with_scale(FusionContext& f) {
  const ValueId y = f.graph().node(f.root()).outputs[0];
  Deviation found;
  ValueId scale = kNoValue;
  return match_scaled(f, y, found, scale) && emit(f, y, found, scale, kNoValue);
}

bool fuse_plain(FusionContext& f) {
  const ValueId y = f.graph().node(f.root()).outputs[0];
  Deviation found;
  // Without the subtraction of a mean this is too common a thing to be taken for a normalization.
  return match_quotient(f, y, found) && centered_input(f, found) != kNoValue &&
         emit(f, y, found, kNoValue, kNoValue);
}

const RegisterFusion kWithBias{{"LayerNormalization with bias", "Add", 32, fuse_with_bias}};
const RegisterFusion kWithScale{{"normalization with scale", "Mul", 31, fuse_with_scale}};
const RegisterFusion kPlain{{"LayerNormalization", "Div", 30, fuse_plain}};

}  // namespace

}  // namespace trainrt
