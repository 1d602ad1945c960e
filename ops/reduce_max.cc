// ReduceMax, ReduceMin, ReduceProd and ReduceLogSumExp; ONNX's ReduceLogSum becomes Log(ReduceSum).
//
// Extremal elements share the gradient evenly. d prod / d x_i is the product of all others, which
// prefix and suffix products give without dividing (by a possible zero).
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "graph/autodiff.h"
#include "ops/reduce.h"
#include "ops/reduce_rules.h"

namespace trainrt {

namespace {

// Extremal elements are those equal to the result.
void extremum_gradient(GradientBuilder& g) {
  const ValueId x = g.input(0);
  const DType dtype = g.dtype(x);
  const ValueId y = reduce::keep_dims(g, g.output(0));
  const ValueId dy = reduce::keep_dims(g, g.output_grad(0));
  const ValueId extremal = g.op("Equal", {x, y});
  const ValueId count = g.reduce_to(g.cast(extremal, dtype), g.shape(y));
  g.set_input_grad(0, g.where(extremal, g.div(dy, count), g.scalar(0, dtype)));
}

template <typename R>
OpDef extremum(const char* name, ReductionKind kind) {
  OpDef op = reduce_op<R>(name, /*sharded=*/true, kind);
  op.gradient = extremum_gradient;
  op.examples = reduce::examples(-1, 1);
  return op;
}

// dx_i = dy times the product of the others, by prefix products going up and suffix products coming
// down. (x [rows, n], dy [rows]) -> dx.
template <typename T>
void prod_grad_rows(KernelContext& context) {
  const int64_t n = context.input_shape(0)[1];
  const T* x = context.input<T>(0);
  const T* dy = context.input<T>(1);
  T* dx = context.output<T>(0);
  context.parallel_for(context.input_shape(0)[0],
                       std::max<int64_t>(1, 4096 / std::max<int64_t>(1, n)),
                       [=](int64_t begin, int64_t end) {
                         for (int64_t row = begin; row < end; ++row) {
                           const T* from = x + row * n;
                           T* to = dx + row * n;
                           T product = dy[row];
                           for (int64_t i = 0; i < n; ++i) {
                             to[i] = product;
                             product *= from[i];
                           }
                           product = T(1);
                           for (int64_t i = n; i-- > 0;) {
                             to[i] *= product;
                             product *= from[i];
                           }
                         }
                       });
}

// The reduced dims are brought to the end and merged, for the row-wise gradient node.
void prod_gradient(GradientBuilder& g) {
  const Shape shape = g.input_shape(0);
  const int ndim = static_cast<int>(shape.size());
  std::vector<bool> reduced(shape.size(), false);
  for (const int64_t axis : g.attributes().get_ints("axes")) {
    reduced[static_cast<size_t>(normalize_axis(axis, ndim))] = true;
  }
  std::vector<int64_t> order;
  int64_t count = 1;
  for (const bool last : {false, true}) {
    for (size_t d = 0; d < shape.size(); ++d) {
      if (reduced[d] == last) {
        order.push_back(static_cast<int64_t>(d));
        count *= last ? shape[d] : 1;
      }
    }
  }
  std::vector<int64_t> inverse(order.size());
  for (size_t d = 0; d < order.size(); ++d) {
    inverse[static_cast<size_t>(order[d])] = static_cast<int64_t>(d);
  }
  const ValueId moved = g.transpose(g.input(0), order);
  const int64_t rows = num_elements(g.output_shape(0));
  const ValueId dx = g.op("ReduceProdGrad",
                          {g.reshape(moved, {rows, count}), g.reshape(g.output_grad(0), {rows})});
  g.set_input_grad(0, g.transpose(g.reshape(dx, g.shape(moved)), inverse));
}

OpDef prod_op() {
  OpDef op = reduce_op<reduce::Prod>("ReduceProd");
  op.gradient = prod_gradient;
  op.examples = reduce::examples(0.5, 1.5);
  return op;
}

OpDef prod_grad_op() {
  OpDef op;
  op.name = "ReduceProdGrad";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    TRAINRT_REQUIRE(context.input_shape(0).size() == 2,
                    kInvalidModel,
                    "ReduceProdGrad wants a matrix, got ",
                    shape_string(context.input_shape(0)));
    return {context.input_type(0)};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 4); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors(context, "r n, r -> r n").whole("n").linear({{1}});
  };
  op.reference_kernel = [](KernelContext& context) {
    dispatch_floating(context.input_dtype(0),
                      [&](auto tag) { prod_grad_rows<decltype(tag)>(context); });
  };
  OpExample example;
  example.name = "with a zero";
  example.inputs = {{DType::kFloat32, {3, 4}}, {DType::kFloat32, {3}}};
  example.values = {Tensor::from<float>({1, 2, 3, 4, 0, 2, 3, 4, 0, 0, 1, 2}, {3, 4}), {}};
  op.examples = {example};
  return op;
}

OpDef log_sum_exp_op() {
  OpDef op = reduce_op<reduce::LogSumExp>("ReduceLogSumExp");
  op.gradient = [](GradientBuilder& g) {  // softmax(x) dy
    const ValueId y = reduce::keep_dims(g, g.output(0));
    const ValueId dy = reduce::keep_dims(g, g.output_grad(0));
    g.set_input_grad(0, g.mul(g.op("Exp", {g.sub(g.input(0), y)}), dy));
  };
  op.examples = reduce::examples(-3, 3);
  return op;
}

void upgrade_log_sum(UpgradeContext& context) {
  const std::vector<int64_t> axes = reduce::reduced_axes(context);
  const bool keepdims = context.attributes().get_int("keepdims", 1) != 0;
  const ValueId sum =
      axes.empty() ? context.input(0) : context.reduce_sum(context.input(0), axes, keepdims);
  context.set_outputs(context.emit("Log", {sum}));
}

const RegisterOp kMax{extremum<reduce::Max>("ReduceMax", ReductionKind::kMax)};
const RegisterOp kMin{extremum<reduce::Min>("ReduceMin", ReductionKind::kMin)};
const RegisterOp kProd{prod_op()};
const RegisterOp kProdGrad{prod_grad_op()};
const RegisterOp kLogSumExp{log_sum_exp_op()};
const RegisterUpgrade kLogSum{"ReduceLogSum", upgrade_log_sum};

}  // namespace

}  // namespace trainrt
