// Products that do a neighbour's work, too, because the library that computes them can while their
// numbers are at hand (parallel/passes/epilogue_fusion makes them, for GPUs):
//
// MatMulReluGrad(a, b, y): dx = op(a) . op(b) where y > 0, else 0. The product is the gradient of a
// Relu's result, which was y.
//
// MatMulWeightBiasGrad(a, dy) -> (dw, sums): dw = MatMulWeightGrad(a, dy), and sums[j] the sum over
// all leading dims of operand number `summed`, 0 or 1, which `keepdims` keeps as 1: the gradient of
// a bias beside that of its weight. The operand is dy, which is the first where the weight is
// stored transposed.
#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "ops/matmul.h"
#include "ops/widened.h"

namespace trainrt {

namespace {

TensorType f32(Shape shape) {
  return {DType::kFloat32, std::move(shape)};
}

Cost product_cost(const OpContext& op) {
  const Product p = product_of(op);
  Cost cost;
  cost.bytes = static_cast<double>(op.input_bytes() + op.output_bytes());
  cost.matmuls = {{num_elements(p.batch), p.m, p.n, p.k}};
  return cost;
}

// ---- MatMulReluGrad
// --------------------------------------------------------------------------------

TensorTypes infer_relu_grad(const OpContext& op) {
  const TensorTypes types = get_op("MatMul").infer_types(op);
  const Product p = product_of(op);
  TRAINRT_REQUIRE(p.batch.empty() && p.m * p.n * p.k > 0,
                  kInvalidModel,
                  "MatMulReluGrad of ",
                  shape_string(op.input_shape(0)),
                  " and ",
                  shape_string(op.input_shape(1)),
                  ", wanted one matrix that is not empty");
  TRAINRT_REQUIRE(op.input_type(kReluResult) == types[0],
                  kInvalidModel,
                  "MatMulReluGrad: the product is ",
                  shape_string(types[0].shape),
                  ", Relu's result ",
                  shape_string(op.input_shape(kReluResult)),
                  "; wanted one type");
  return types;
}

template <typename T>
void relu_grad_of(KernelContext& op) {
  const Product p = product_of(op);
  const T *a = op.input<T>(0), *b = op.input<T>(1), *y = op.input<T>(kReluResult);
  T* dx = op.output<T>(0);
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      const int64_t at = i * p.n + j;
      dx[at] = y[at] > T(0) ? static_cast<T>(product_element(p, a, b, i, j)) : T(0);
    }
  }
}

OpDef matmul_relu_grad_op() {
  OpDef op;
  op.name = "MatMulReluGrad";
  op.infer_types = infer_relu_grad;
  op.cost = product_cost;
  op.sharding = [](const OpContext& context) -> ShardingRule {
    const bool trans_a = context.attributes().get_int("trans_a", 0) != 0;
    const bool trans_b = context.attributes().get_int("trans_b", 0) != 0;
    return Factors(context,
                   concat(trans_a ? "... k m" : "... m k",
                          ", ",
                          trans_b ? "... n k" : "... k n",
                          ", ... m n -> ... m n"))
        .whole("k");
  };
  op.reference_kernel = [](KernelContext& context) {
    dispatch_numeric(context.output_dtype(0),
                     [&](auto tag) { relu_grad_of<decltype(tag)>(context); });
  };
  op.not_differentiable = true;
  op.inplace = {{0, kReluResult}};
  op.workspace = [](const OpContext& context, const DeviceSpec& spec) {
    const Product p = product_of(context);
    return spec.backend == Backend::kCuda ? sign_mask_bytes(p) + cublas_workspace(p, spec) : 0;
  };
  op.examples = {
      {.name = "rows", .inputs = {f32({5, 6}), f32({6, 8}), f32({5, 8})}},
      {.name = "sequence_transposed_weight",
       .attributes = {{"trans_b", int64_t{1}}},
       .inputs = {f32({2, 4, 6}), f32({130, 6}), f32({2, 4, 130})}},
      {.name = "one_term", .inputs = {f32({4, 1}), f32({1, 8}), f32({4, 8})}},
  };
  widen_16_bit(op);
  return op;
}

// ---- MatMulWeightBiasGrad
// --------------------------------------------------------------------------

int summed_operand(const Attributes& attributes) {
  return static_cast<int>(attributes.get_int("summed"));
}

TensorTypes infer_weight_bias_grad(const OpContext& op) {
  TensorTypes types = get_op("MatMulWeightGrad").infer_types(op);
  const int summed = summed_operand(op.attributes());
  TRAINRT_REQUIRE((summed == 0 || summed == 1) && op.num_elements(0) * op.num_elements(1) > 0,
                  kInvalidModel,
                  "MatMulWeightBiasGrad: operand ",
                  summed,
                  " of ",
                  shape_string(op.input_shape(0)),
                  " and ",
                  shape_string(op.input_shape(1)),
                  " is to be summed, wanted 0 or 1 of two that are not empty");
  const Shape& shape = op.input_shape(summed);
  Shape sums(op.attributes().get_int("keepdims", 0) != 0 ? shape.size() : 1, 1);
  sums.back() = shape.back();
  types.push_back({types[0].dtype, std::move(sums)});
  return types;
}

ShardingRule shard_weight_bias_grad(const OpContext& op) {
  std::string rows;
  const size_t num_rows = op.input_shape(0).size() - 1;
  for (size_t d = 0; d < num_rows; ++d) {
    rows += concat("b", d, " ");
  }
  std::string sums;
  for (size_t d = 1; d < op.output_shape(1).size(); ++d) {
    sums += "1 ";
  }
  sums += summed_operand(op.attributes()) == 0 ? "k" : "n";
  Factors factors(op, concat(rows, "k, ", rows, "n -> k n, ", sums));
  for (size_t d = 0; d < num_rows; ++d) {
    factors.reduction(concat("b", d));
  }
  return factors;
}

template <typename T>
void weight_bias_grad_of(KernelContext& op) {
  const Product p = product_of(op);
  const T *a = op.input<T>(0), *dy = op.input<T>(1);
  for (int64_t at = 0; op.has_output(0) && at < p.m * p.n; ++at) {
    op.output<T>(0)[at] = static_cast<T>(product_element(p, a, dy, at / p.n, at % p.n));
  }
  const bool first = summed_operand(op.attributes()) == 0;
  const int64_t columns = first ? p.m : p.n;
  for (int64_t j = 0; op.has_output(1) && j < columns; ++j) {
    Accumulator<T> sum = 0;
    for (int64_t row = 0; row < p.k; ++row) {
      sum += static_cast<Accumulator<T>>((first ? a : dy)[row * columns + j]);
    }
    op.output<T>(1)[j] = static_cast<T>(sum);
  }
}

OpDef matmul_weight_bias_grad_op() {
  OpDef op;
  op.name = "MatMulWeightBiasGrad";
  op.infer_types = infer_weight_bias_grad;
  op.cost = product_cost;
  op.sharding = shard_weight_bias_grad;
  op.reference_kernel = [](KernelContext& context) {
    dispatch_numeric(context.input_dtype(0),
                     [&](auto tag) { weight_bias_grad_of<decltype(tag)>(context); });
  };
  op.not_differentiable = true;
  op.workspace = [](const OpContext& context, const DeviceSpec& spec) {
    return spec.backend == Backend::kCuda ? cublas_workspace(product_of(context), spec) : 0;
  };
  op.examples = {
      {.name = "second",
       .attributes = {{"summed", int64_t{1}}},
       .inputs = {f32({2, 4, 6}), f32({2, 4, 8})}},
      {.name = "first",
       .attributes = {{"summed", int64_t{0}}},
       .inputs = {f32({9, 6}), f32({9, 8})}},
      {.name = "kept_dims",
       .attributes = {{"summed", int64_t{1}}, {"keepdims", int64_t{1}}},
       .inputs = {f32({2, 4, 6}), f32({2, 4, 8})}},
      {.name = "one_column",
       .attributes = {{"summed", int64_t{1}}},
       .inputs = {f32({9, 6}), f32({9, 1})}},
  };
  widen_16_bit(op);
  return op;
}

const RegisterOp kMatMulReluGrad{matmul_relu_grad_op()};
const RegisterOp kMatMulWeightBiasGrad{matmul_weight_bias_grad_op()};

}  // namespace

}  // namespace trainrt
