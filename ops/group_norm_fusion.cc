// Finds GroupNorm in the small operators that PyTorch's exporter writes it in, where opset 18 is
// not asked for: y = Reshape(InstanceNormalization(Reshape(x, [n, groups, rest]), 1, 0)) scale +
// bias.
#include <algorithm>

#include "graph/op_def.h"
#include "graph/passes/fusion.h"

namespace trainrt {

namespace {

// Whether `value` is a constant of nothing but `number`.
bool is_filled(const FusionContext& f, ValueId value, double number) {
  const Tensor& constant = f.graph().value(value).constant;
  if (!constant.defined()) {
    return false;
  }
  const std::vector<double> numbers = constant.to_double();
  return std::all_of(
      numbers.begin(), numbers.end(), [number](double element) { return element == number; });
}

// Whether `value` has a number for every channel of images of `ndim` dims, as broadcasting puts it.
bool is_per_channel(const FusionContext& f, ValueId value, int64_t channels, size_t ndim) {
  Shape shape = f.shape(value), wanted(ndim - 1, 1);
  wanted[0] = channels;
  if (shape.size() == ndim && shape[0] == 1) {
    shape.erase(shape.begin());
  }
  return shape == wanted;
}

// The node that makes `value`, which nothing else reads.
const Node* maker(const FusionContext& f, ValueId value, const char* op_type) {
  const NodeId id = f.single_use(value) ? f.producer(value, op_type) : kNoNode;
  return id == kNoNode ? nullptr : &f.graph().node(id);
}

bool fuse(FusionContext& f) {
  const Node add = f.graph().node(f.root());
  const Shape shape = f.shape(add.outputs[0]);
  if (shape.size() < 3) {
    return false;
  }
  for (const size_t i : {0u, 1u}) {
    const Node* mul = maker(f, add.inputs[i], "Mul");
    for (size_t j = 0; mul != nullptr && j < 2; ++j) {
      const ValueId scale = mul->inputs[1 - j], bias = add.inputs[1 - i];
      const Node* back = maker(f, mul->inputs[j], "Reshape");
      const Node* norm = back == nullptr ? nullptr : maker(f, back->inputs[0], "GroupNorm");
      const Node* grouped = norm == nullptr ? nullptr : maker(f, norm->inputs[0], "Reshape");
      if (grouped == nullptr || f.shape(grouped->inputs[0]) != shape ||
          f.shape(mul->inputs[j]) != shape || !is_filled(f, norm->inputs[1], 1) ||
          !is_filled(f, norm->inputs[2], 0) || !is_per_channel(f, scale, shape[1], shape.size()) ||
          !is_per_channel(f, bias, shape[1], shape.size())) {
        continue;
      }
      const Shape rows = f.shape(norm->inputs[0]);
      const int64_t groups = norm->attributes.get_int("num_groups");
      if (rows[0] != shape[0] || rows[1] != groups || shape[1] % groups != 0) {
        continue;  // groups that are no runs of channels of an image
      }
      const Attributes attributes = norm->attributes;
      const ValueId x = grouped->inputs[0];
      const ValueId y =
          f.op("GroupNorm",
               {x, f.reshape(scale, {shape[1]}), f.reshape(bias, {shape[1]})},
               {{"num_groups", groups}, {"epsilon", attributes.get_float("epsilon", 1e-5)}});
      f.replace(add.outputs[0], y);
      return true;
    }
  }
  return false;
}

const RegisterFusion kGroupNorm{{"GroupNorm", "Add", 32, fuse}};

}  // namespace

}  // namespace trainrt
