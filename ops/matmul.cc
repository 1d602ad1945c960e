// MatMul: y = op(a) . op(b) over the last two dims, leading dims broadcast; op swaps the last two
// dims when trans_a / trans_b is 1. Integers are allowed (ONNX allows them), by the reference
// kernel.
//
// MatMulWeightGrad: y[k, n] = sum over all leading dims of a[..., k] dy[..., n]: the gradient of a
// weight that is shared by all rows. One operator rather than reshapes around a MatMul, so that
// batch and sequence stay factors of their own and each can be split.
//
// MatMulAdd(a, b, bias[n], term): y = op(a) . op(b) + bias + term, either of the two absent, term
// of y's shape. Emitted where a rank's program is settled (parallel/passes/epilogue_fusion), so
// nothing differentiates or splits it. The product is complete before anything is added: same bits
// as by nodes of their own.
//
// float32 and bfloat16 run on oneDNN. Leading dims are folded into rows where b has none: one large
// product. float64 (comparisons against other frameworks) runs on Eigen, cut into fixed row blocks.
#include "ops/matmul.h"

#include <cstring>

#include "graph/autodiff.h"
#include "graph/upgrade.h"
#include "ops/matmul_f64.h"
#include "ops/onednn.h"
#include "ops/widened.h"

namespace trainrt {

namespace {

template <typename T>
void product_reference(KernelContext& op) {
  const Product p = product_of(op);
  const T* a = op.input<T>(0);
  const T* b = op.input<T>(1);
  const T* bias = op.input<T>(kBias);
  const T* term = op.input<T>(kTerm);
  T* y = op.output<T>(0);
  for_each_matrix(p, [&](int64_t a_offset, int64_t b_offset, int64_t y_offset) {
    for (int64_t i = 0; i < p.m; ++i) {
      for (int64_t j = 0; j < p.n; ++j) {
        const int64_t at = y_offset + i * p.n + j;
        T value = static_cast<T>(product_element(p, a + a_offset, b + b_offset, i, j));
        value = bias != nullptr ? static_cast<T>(value + bias[j]) : value;
        y[at] = term != nullptr ? static_cast<T>(value + term[at]) : value;
      }
    }
  });
}

void reference(KernelContext& op) {
  dispatch_numeric(op.output_dtype(0), [&](auto tag) { product_reference<decltype(tag)>(op); });
}

void product_f64(KernelContext& op) {
  const Product p = product_of(op);
  const double* a = op.input<double>(0);
  const double* b = op.input<double>(1);
  double* y = op.output<double>(0);
  for_each_matrix(p, [&](int64_t a_offset, int64_t b_offset, int64_t y_offset) {
    matmul_f64(op,
               {a + a_offset, p.a_row, p.a_column},
               {b + b_offset, p.b_row, p.b_column},
               {y + y_offset, p.n},
               p.m,
               p.n,
               p.k);
  });
}

onednn::Prepared prepare_product(const OpContext& op) {
  const Product p = product_of(op);
  const DType dtype = op.input_dtype(0);
  // Dims of size 1 where an operand broadcasts.
  const auto desc = [&](int64_t rows,
                        int64_t columns,
                        int64_t row_stride,
                        int64_t column_stride,
                        const Shape* batch_strides) {
    Shape dims = p.batch;
    Shape strides = batch_strides ? *batch_strides : Shape{};
    for (size_t d = 0; d < dims.size(); ++d) {
      if (strides[d] == 0) {
        dims[d] = 1;
        strides[d] = rows * columns;
      }
    }
    dims.insert(dims.end(), {rows, columns});
    strides.insert(strides.end(), {row_stride, column_stride});
    return onednn::strided(dtype, dims, strides);
  };
  const dnnl::memory::desc a = desc(p.m, p.k, p.a_row, p.a_column, &p.a_batch_strides);
  const dnnl::memory::desc b = desc(p.k, p.n, p.b_row, p.b_column, &p.b_batch_strides);
  Shape y_shape = p.batch;
  y_shape.insert(y_shape.end(), {p.m, p.n});
  const dnnl::memory::desc y = onednn::row_major(dtype, y_shape);
  std::vector<onednn::Argument> arguments = {
      {DNNL_ARG_SRC, false, 0, a}, {DNNL_ARG_WEIGHTS, false, 1, b}, {DNNL_ARG_DST, true, 0, y}};
  dnnl::primitive_attr attr = onednn::user_scratchpad();
  if (op.has_input(kTerm)) {  // lies in y when the product starts
    dnnl::post_ops post_ops;
    post_ops.append_sum(1.0f);
    attr.set_post_ops(post_ops);
  }
  dnnl::memory::desc bias;  // absent
  if (op.has_input(kBias)) {
    Shape bias_shape(y_shape.size(), 1);
    bias_shape.back() = p.n;
    bias = onednn::row_major(dtype, bias_shape);
    arguments.push_back({DNNL_ARG_BIAS, false, kBias, bias});
  }
  const dnnl::matmul::primitive_desc primitive_desc(onednn::engine(), a, b, bias, y, attr);
  return {primitive_desc, dnnl::matmul(primitive_desc), std::move(arguments)};
}

bool runs_on_onednn(const OpContext& op) {
  return onednn::supports(op.input_dtype(0)) && num_elements(op.output_shape(0)) > 0 &&
         op.num_elements(0) > 0;
}

int64_t workspace(const OpContext& op, const DeviceSpec& spec) {
  if (spec.backend == Backend::kCuda) {
    return cublas_workspace(product_of(op), spec);
  }
  if (!runs_on_onednn(op)) {
    return 0;
  }
  return onednn::prepare(op, spec, prepare_product)->workspace_bytes();
}

Kernel cpu_factory(const OpContext& op, const DeviceSpec& spec) {
  const bool adds = op.has_input(kBias) || op.has_input(kTerm);
  if (op.input_dtype(0) == DType::kFloat64 && !adds) {
    return product_f64;
  }
  if (!runs_on_onednn(op)) {
    return reference;
  }
  return [prepared = onednn::prepare(op, spec, prepare_product)](KernelContext& context) {
    if (context.has_input(kTerm) && context.raw_input(kTerm) != context.raw_output(0)) {
      std::memcpy(context.raw_output(0),
                  context.raw_input(kTerm),
                  static_cast<size_t>(context.output_type(0).bytes()));
    }
    prepared->run(context);
  };
}

Cost cost(const OpContext& op) {
  const Product p = product_of(op);
  Cost cost;
  cost.bytes = static_cast<double>(op.input_bytes() + op.output_bytes());
  cost.matmuls = {{num_elements(p.batch), p.m, p.n, p.k}};
  return cost;
}

TensorTypes infer_matmul(const OpContext& op) {
  const Shape& a = op.input_shape(0);
  const Shape& b = op.input_shape(1);
  TRAINRT_REQUIRE(op.num_inputs() >= 2 && a.size() >= 2 && b.size() >= 2,
                  kInvalidModel,
                  "MatMul wants two matrices, got ",
                  shape_string(a),
                  " and ",
                  shape_string(b));
  TRAINRT_REQUIRE(op.input_dtype(0) == op.input_dtype(1),
                  kInvalidModel,
                  "MatMul of ",
                  dtype_name(op.input_dtype(0)),
                  " and ",
                  dtype_name(op.input_dtype(1)));
  const bool trans_a = op.attributes().get_int("trans_a", 0) != 0;
  const bool trans_b = op.attributes().get_int("trans_b", 0) != 0;
  const int64_t k_a = a[a.size() - (trans_a ? 2 : 1)];
  const int64_t k_b = b[b.size() - (trans_b ? 1 : 2)];
  TRAINRT_REQUIRE(k_a == k_b,
                  kInvalidModel,
                  "MatMul: inner sizes ",
                  k_a,
                  " and ",
                  k_b,
                  " of shapes ",
                  shape_string(a),
                  (trans_a ? "^T" : ""),
                  " and ",
                  shape_string(b),
                  (trans_b ? "^T" : ""),
                  " differ");
  Shape out = broadcast_shapes(leading(a), leading(b));
  out.push_back(a[a.size() - (trans_a ? 1 : 2)]);
  out.push_back(b[b.size() - (trans_b ? 2 : 1)]);
  return {{op.input_dtype(0), out}};
}

ShardingRule shard_matmul(const OpContext& op) {
  const bool trans_a = op.attributes().get_int("trans_a", 0) != 0;
  const bool trans_b = op.attributes().get_int("trans_b", 0) != 0;
  const std::string equation =
      concat(trans_a ? "... k m" : "... m k", ", ", trans_b ? "... n k" : "... k n", " -> ... m n");
  return Factors(op, equation).reduction("k").linear({{0}, {1}});
}

void matmul_gradient(GradientBuilder& g) {
  const bool ta = g.attributes().get_int("trans_a", 0) != 0;
  const bool tb = g.attributes().get_int("trans_b", 0) != 0;
  const ValueId a = g.input(0), b = g.input(1), dy = g.output_grad(0);
  // The weight's gradient first: what it reads (an activation made again) may then go before the
  // input's gradient, which is as large, comes into being.
  if (g.needs_grad(1)) {
    ValueId db = kNoValue;
    if (g.ndim(b) == 2 && g.ndim(a) > 2 && !ta) {
      db = tb ? g.op("MatMulWeightGrad", {dy, a}) : g.op("MatMulWeightGrad", {a, dy});
    } else {
      db = tb ? g.matmul(dy, a, true, ta) : g.matmul(a, dy, !ta, false);
    }
    g.set_input_grad(1, g.reduce_to(db, g.shape(b)));
  }
  if (g.needs_grad(0)) {
    const ValueId da = ta ? g.matmul(b, dy, tb, true) : g.matmul(dy, b, false, !tb);
    g.set_input_grad(0, g.reduce_to(da, g.shape(a)));
  }
}

// ONNX's MatMul follows numpy.matmul: a 1-D operand gets a dim that the result loses again.
void upgrade_matmul(UpgradeContext& u) {
  ValueId a = u.input(0), b = u.input(1);
  const bool vector_a = u.ndim(a) == 1, vector_b = u.ndim(b) == 1;
  if (u.ndim(a) == 0 || u.ndim(b) == 0) {
    u.fail("operands must have at least one dim");
  }
  if (vector_a) {
    a = u.reshape(a, {1, u.shape(a)[0]});
  }
  if (vector_b) {
    b = u.reshape(b, {u.shape(b)[0], 1});
  }
  ValueId y = u.emit("MatMul", {a, b}).at(0);
  Shape shape = u.shape(y);
  if (vector_b) {
    shape.pop_back();
  }
  if (vector_a) {
    shape.erase(shape.end() - (vector_b ? 1 : 2));
  }
  u.set_output(0, u.reshape(y, shape));
}

// com.microsoft.FusedMatMul: alpha * op(a) . op(b).
void upgrade_fused_matmul(UpgradeContext& u) {
  if (u.attributes().get_int("transBatchA", 0) != 0 ||
      u.attributes().get_int("transBatchB", 0) != 0) {
    u.fail("transBatchA and transBatchB are not supported");
  }
  const ValueId y = u.matmul(u.input(0),
                             u.input(1),
                             u.attributes().get_int("transA", 0) != 0,
                             u.attributes().get_int("transB", 0) != 0);
  const double alpha = u.attributes().get_float("alpha", 1);
  u.set_output(0, alpha == 1 ? y : u.mul(y, alpha));
}

std::vector<OpExample> matmul_examples() {
  const auto f32 = [](Shape shape) { return TensorType{DType::kFloat32, std::move(shape)}; };
  return {
      {.name = "matrices", .attributes = {}, .inputs = {f32({4, 6}), f32({6, 8})}, .values = {}},
      {.name = "transposed_a",
       .attributes = {{"trans_a", int64_t{1}}},
       .inputs = {f32({6, 4}), f32({6, 8})},
       .values = {}},
      {.name = "transposed_b",
       .attributes = {{"trans_b", int64_t{1}}},
       .inputs = {f32({4, 6}), f32({8, 6})},
       .values = {}},
      {.name = "both_transposed_batched",
       .attributes = {{"trans_a", int64_t{1}}, {"trans_b", int64_t{1}}},
       .inputs = {f32({2, 6, 4}), f32({2, 8, 6})},
       .values = {}},
      {.name = "shared_weight",
       .attributes = {},
       .inputs = {f32({2, 4, 6}), f32({6, 8})},
       .values = {}},
      {.name = "shared_weight_transposed",
       .attributes = {{"trans_b", int64_t{1}}},
       .inputs = {f32({2, 2, 4, 6}), f32({8, 6})},
       .values = {}},
      {.name = "shared_left",
       .attributes = {},
       .inputs = {f32({4, 6}), f32({2, 6, 8})},
       .values = {}},
      {.name = "broadcast_batch",
       .attributes = {},
       .inputs = {f32({2, 1, 4, 6}), f32({3, 6, 2})},
       .values = {}},
      {.name = "heads",
       .attributes = {},
       .inputs = {f32({2, 4, 4, 6}), f32({2, 4, 6, 8})},
       .values = {}},
      {.name = "one_term_transposed_b",
       .attributes = {{"trans_b", int64_t{1}}},
       .inputs = {f32({4, 1}), f32({8, 1})},
       .values = {}},
      {.name = "one_row_transposed_a",
       .attributes = {{"trans_a", int64_t{1}}},
       .inputs = {f32({6, 1}), f32({6, 8})},
       .values = {}},
  };
}

OpDef matmul_op() {
  OpDef op;
  op.name = "MatMul";
  op.infer_types = infer_matmul;
  op.cost = cost;
  op.sharding = shard_matmul;
  op.reference_kernel = reference;
  op.gradient = matmul_gradient;
  op.upgrade = upgrade_matmul;
  op.workspace = workspace;
  op.cpu_factory = cpu_factory;
  widen_16_bit(op, runs_on_onednn);
  op.precision = PrecisionRule::kLow;
  op.examples = matmul_examples();
  return op;
}

TensorTypes infer_weight_grad(const OpContext& op) {
  const Shape& a = op.input_shape(0);
  const Shape& dy = op.input_shape(1);
  TRAINRT_REQUIRE(
      !a.empty() && a.size() == dy.size() && std::equal(a.begin(), a.end() - 1, dy.begin()),
      kInvalidModel,
      "MatMulWeightGrad wants equal leading dims, got ",
      shape_string(a),
      " and ",
      shape_string(dy));
  return {{op.input_dtype(0), {a.back(), dy.back()}}};
}

ShardingRule shard_weight_grad(const OpContext& op) {
  std::string rows;
  const size_t num_rows = op.input_shape(0).size() - 1;
  for (size_t d = 0; d < num_rows; ++d) {
    rows += concat("b", d, " ");
  }
  Factors factors(op, concat(rows, "k, ", rows, "n -> k n"));
  for (size_t d = 0; d < num_rows; ++d) {
    factors.reduction(concat("b", d));
  }
  return factors.linear({{0}, {1}});
}

void weight_grad_gradient(GradientBuilder& g) {
  const ValueId dw = g.output_grad(0);
  if (g.needs_grad(0)) {
    g.set_input_grad(0, g.matmul(g.input(1), dw, false, true));
  }
  if (g.needs_grad(1)) {
    g.set_input_grad(1, g.matmul(g.input(0), dw));
  }
}

OpDef weight_grad_op() {
  OpDef op;
  op.name = "MatMulWeightGrad";
  op.infer_types = infer_weight_grad;
  op.cost = cost;
  op.sharding = shard_weight_grad;
  op.reference_kernel = reference;
  op.gradient = weight_grad_gradient;
  op.workspace = workspace;
  op.cpu_factory = cpu_factory;
  widen_16_bit(op, runs_on_onednn);
  op.examples = {{.name = "sequence",
                  .attributes = {},
                  .inputs = {{DType::kFloat32, {2, 4, 6}}, {DType::kFloat32, {2, 4, 8}}},
                  .values = {}},
                 {.name = "one_row",
                  .attributes = {},
                  .inputs = {{DType::kFloat32, {9, 1}}, {DType::kFloat32, {9, 8}}},
                  .values = {}}};
  return op;
}

TensorTypes infer_matmul_add(const OpContext& op) {
  const TensorTypes types = infer_matmul(op);
  const TensorType bias{types[0].dtype, {types[0].shape.back()}};
  TRAINRT_REQUIRE((!op.has_input(kBias) || op.input_type(kBias) == bias) &&
                      (!op.has_input(kTerm) || op.input_type(kTerm) == types[0]),
                  kInvalidModel,
                  "MatMulAdd: the product is ",
                  shape_string(types[0].shape),
                  ", wanted a bias over its last dim and a term of its type");
  return types;
}

// What is added must be added once, so k cannot be split.
ShardingRule shard_matmul_add(const OpContext& op) {
  const bool trans_a = op.attributes().get_int("trans_a", 0) != 0;
  const bool trans_b = op.attributes().get_int("trans_b", 0) != 0;
  std::string equation =
      concat(trans_a ? "... k m" : "... m k", ", ", trans_b ? "... n k" : "... k n");
  if (op.num_inputs() > kBias) {
    equation += op.has_input(kBias) ? ", n" : ", _";
  }
  if (op.num_inputs() > kTerm) {
    equation += op.has_input(kTerm) ? ", ... m n" : ", _";
  }
  return Factors(op, equation + " -> ... m n").whole("k");
}

OpDef matmul_add_op() {
  OpDef op;
  op.name = "MatMulAdd";
  op.infer_types = infer_matmul_add;
  op.cost = cost;
  op.sharding = shard_matmul_add;
  op.reference_kernel = reference;
  op.not_differentiable = true;
  op.inplace = {{0, kTerm}};
  op.workspace = workspace;
  op.cpu_factory = cpu_factory;
  const auto f32 = [](Shape shape) { return TensorType{DType::kFloat32, std::move(shape)}; };
  op.examples = {
      {.name = "bias", .inputs = {f32({2, 4, 6}), f32({6, 8}), f32({8}), {}}, .absent = {kTerm}},
      {.name = "term",
       .attributes = {{"trans_b", int64_t{1}}},
       .inputs = {f32({2, 4, 6}), f32({8, 6}), {}, f32({2, 4, 8})},
       .absent = {kBias}},
      {.name = "batched_bias_and_term",
       .attributes = {{"trans_a", int64_t{1}}},
       .inputs = {f32({2, 6, 4}), f32({2, 6, 8}), f32({8}), f32({2, 4, 8})}},
  };
  return op;
}

const RegisterOp kMatMul{matmul_op()};
const RegisterOp kMatMulAdd{matmul_add_op()};
const RegisterOp kMatMulWeightGrad{weight_grad_op()};
const RegisterUpgrade kFusedMatMul{"com.microsoft", "FusedMatMul", upgrade_fused_matmul};

}  // namespace

}  // namespace trainrt
