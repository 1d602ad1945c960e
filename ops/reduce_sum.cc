// ReduceSum, ReduceMean and the norms ReduceL1, ReduceL2, ReduceSumSquare; ONNX's ReduceLogSum is
// rewritten. All have an obvious gradient: dy spread out, times the derivative of one term.
#include <cmath>
#include <type_traits>

#include "graph/autodiff.h"
#include "ops/reduce.h"
#include "ops/reduce_rules.h"

namespace trainrt {

namespace {

// The gradient with respect to one term, `factor` or a tensor of it, spread over the input.
void spread(GradientBuilder& g, double factor) {
  ValueId dy = reduce::keep_dims(g, g.output_grad(0));
  if (factor != 1) {
    dy = g.mul(dy, factor);
  }
  g.set_input_grad(0, g.expand(dy, g.input_shape(0)));
}

int64_t reduced_count(const Shape& shape, const Attributes& attributes) {
  int64_t count = 1;
  for (const int64_t axis : attributes.get_ints("axes")) {
    count *= shape[static_cast<size_t>(normalize_axis(axis, static_cast<int>(shape.size())))];
  }
  return attributes.get_int("count", count);
}

OpDef sum_op() {
  OpDef op = reduce_op<reduce::Sum>("ReduceSum", /*sharded=*/true);
  op.sharding = [rule_of = op.sharding](const OpContext& context) {
    ShardingRule rule = rule_of(context);
    rule.linear = {{0}};
    return rule;
  };
  op.gradient = [](GradientBuilder& g) { spread(g, 1); };
  op.examples = reduce::examples(-1, 1);
  op.examples.push_back(
      {.name = "many rows of many columns",
       .attributes = {{"axes", std::vector<int64_t>{0}}, {"keepdims", int64_t{0}}},
       .inputs = {{DType::kFloat32, {100, 40}}}});
  return op;
}

OpDef mean_op() {
  OpDef op = reduce_op<reduce::Mean>("ReduceMean", /*sharded=*/true);
  op.sharding = [rule_of = op.sharding](const OpContext& context) {
    ShardingRule rule = rule_of(context);
    rule.linear = {{0}};
    return rule;
  };
  // A shard divides its sum by the whole's count, so that shards add up to the mean.
  op.localize = [](const OpContext& context, const FactorShard&) {
    Attributes attributes = context.attributes();
    attributes.set("count", reduced_count(context.input_shape(0), attributes));
    return attributes;
  };
  op.gradient = [](GradientBuilder& g) {
    spread(g, 1.0 / static_cast<double>(reduced_count(g.input_shape(0), g.attributes())));
  };
  op.examples = reduce::examples(-1, 1);
  return op;
}

OpDef l1_op() {
  OpDef op = reduce_op<reduce::L1>("ReduceL1", /*sharded=*/true);
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(0, g.mul(g.op("Sign", {g.input(0)}), reduce::keep_dims(g, g.output_grad(0))));
  };
  op.examples = reduce::examples(-1, 1);
  return op;
}

OpDef sum_square_op() {
  OpDef op = reduce_op<reduce::SumSquare>("ReduceSumSquare", /*sharded=*/true);
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(0, g.mul(g.input(0), g.mul(reduce::keep_dims(g, g.output_grad(0)), 2.0)));
  };
  op.examples = reduce::examples(-1, 1);
  return op;
}

OpDef l2_op() {
  OpDef op = reduce_op<reduce::L2>("ReduceL2");
  op.gradient = [](GradientBuilder& g) {  // x dy / y, and 0 rather than 0 / 0 at the origin
    const ValueId y = g.output(0), dy = g.output_grad(0);
    const ValueId zero = g.scalar(0, g.dtype(y));
    const ValueId ratio = g.where(g.op("Equal", {y, zero}), zero, g.div(dy, y));
    g.set_input_grad(0, g.mul(g.input(0), reduce::keep_dims(g, ratio)));
  };
  op.examples = reduce::examples(-1, 1);
  return op;
}

const RegisterOp kSum{sum_op()};
const RegisterOp kMean{mean_op()};
const RegisterOp kL1{l1_op()};
const RegisterOp kSumSquare{sum_square_op()};
const RegisterOp kL2{l2_op()};
}  // namespace

}  // namespace trainrt
