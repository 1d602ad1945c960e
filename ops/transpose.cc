// Transpose: output dim d is input dim perm[d].
#include <algorithm>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/strided_copy.h"

namespace trainrt {

namespace {

void transpose_kernel(KernelContext& context) {
  const std::vector<int64_t>& perm = context.attributes().get_ints("perm");
  const Shape& out = context.output_shape(0);
  const Shape in_strides = row_major_strides(context.input_shape(0));
  Shape strides;
  for (const int64_t axis : perm) {
    strides.push_back(in_strides[static_cast<size_t>(axis)]);
  }
  strided_copy(context,
               dtype_bytes(context.output_dtype(0)),
               out,
               {context.raw_output(0), row_major_strides(out)},
               {context.raw_input(0), strides});
}

TensorTypes transpose_types(const OpContext& op) {
  const Shape& from = op.input_shape(0);
  const std::vector<int64_t>& perm = op.attributes().get_ints("perm");
  std::vector<int64_t> sorted = perm;
  std::sort(sorted.begin(), sorted.end());
  bool permutation = sorted.size() == from.size();
  for (size_t d = 0; permutation && d < sorted.size(); ++d) {
    permutation = sorted[d] == static_cast<int64_t>(d);
  }
  TRAINRT_REQUIRE(permutation,
                  kInvalidModel,
                  "perm ",
                  shape_string(perm),
                  " is not a permutation of the dims of ",
                  shape_string(from));
  Shape shape;
  for (const int64_t axis : perm) {
    shape.push_back(from[static_cast<size_t>(axis)]);
  }
  return {{op.input_dtype(0), shape}};
}

ShardingRule transpose_sharding(const OpContext& op) {
  ShardingRule rule;
  const Shape& out = op.output_shape(0);
  const std::vector<int64_t>& perm = op.attributes().get_ints("perm");
  rule.inputs.resize(1, TensorFactors(out.size()));
  rule.outputs.resize(1, TensorFactors(out.size()));
  for (size_t d = 0; d < out.size(); ++d) {
    const int factor = static_cast<int>(d);
    rule.factors.push_back({concat("d", d), out[d]});
    rule.outputs[0][d] = {factor};
    rule.inputs[0][static_cast<size_t>(perm[d])] = {factor};
  }
  rule.linear = {{0}};
  return rule;
}

void transpose_gradient(GradientBuilder& g) {
  const std::vector<int64_t>& perm = g.attributes().get_ints("perm");
  std::vector<int64_t> inverse(perm.size());
  for (size_t d = 0; d < perm.size(); ++d) {
    inverse[static_cast<size_t>(perm[d])] = static_cast<int64_t>(d);
  }
  g.set_input_grad(0, g.transpose(g.output_grad(0), inverse));
}

void upgrade_transpose(UpgradeContext& context) {
  std::vector<int64_t> reversed;
  for (int d = context.ndim(context.input(0)); d-- > 0;) {
    reversed.push_back(d);
  }
  std::vector<int64_t> perm = context.attributes().get_ints("perm", reversed);
  context.set_outputs(context.emit("Transpose", {context.input(0)}, {{"perm", perm}}));
}

OpExample example(std::string name, Shape shape, std::vector<int64_t> perm) {
  OpExample transpose;
  transpose.name = std::move(name);
  transpose.attributes = {{"perm", std::move(perm)}};
  transpose.inputs = {{DType::kFloat32, std::move(shape)}};
  return transpose;
}

OpDef transpose_op() {
  OpDef op;
  op.name = "Transpose";
  op.infer_types = transpose_types;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = transpose_sharding;
  op.gradient = transpose_gradient;
  op.upgrade = upgrade_transpose;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = transpose_kernel;
  op.examples = {example("matrix", {70, 6}, {1, 0}),
                 example("heads", {2, 6, 4, 5}, {0, 2, 1, 3}),
                 example("last to front", {4, 6, 35}, {2, 0, 1}),
                 example("keys", {2, 6, 4, 5}, {0, 2, 3, 1}),
                 example("reversed", {3, 4, 5, 6}, {3, 2, 1, 0})};
  return op;
}

const RegisterOp kTranspose{transpose_op()};

}  // namespace

}  // namespace trainrt
