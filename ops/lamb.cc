// LAMB (You et al., arXiv 1904.00962, algorithm 2), cut where it needs the norms of whole tensors:
//   LambDirection: m, v as Adam; u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p
//   LambApply:     p <- p - lr r u with the trust ratio r = |p| / |u|, or 1 where either norm is 0
// The norms come as square sums (ops/gradient_norm.cc) and so do not depend on how p is sharded.
#include "ops/optimizer_kernel.h"

namespace trainrt {

namespace {

// (param, grad, m, v, grad_scale, step) -> (u, m, v)
void direction_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const double scale = optimizer::scalar_input(k, 4);
    const optimizer::LambDirection<T> rule(optimizer::Constants(k.attributes()),
                                           {0, scale, optimizer::scalar_input(k, 5)});
    const T* param = k.input<T>(0);
    const T* grad = k.input<T>(1);
    T* direction = k.output<T>(0);
    T* first = k.output<T>(1);
    T* second = k.output<T>(2);
    if (!std::isfinite(scale)) {
      std::fill(direction, direction + num_elements(k.output_shape(0)), T(0));
      return;
    }
    optimizer::update(k, scale, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        direction[i] = rule(param[i], grad[i], first[i], second[i]);
      }
    });
  });
}

// (param, u, square sum of param, square sum of u, learning_rate, grad_scale) -> param
void apply_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const double param_norm = std::sqrt(*k.input<double>(2));
    const double direction_norm = std::sqrt(*k.input<double>(3));
    const double ratio = param_norm > 0 && direction_norm > 0 ? param_norm / direction_norm : 1;
    const T factor = static_cast<T>(optimizer::scalar_input(k, 4) * ratio);
    T* param = k.output<T>(0);
    const T* direction = k.input<T>(1);
    optimizer::update(k, optimizer::scalar_input(k, 5), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        param[i] -= factor * direction[i];
      }
    });
  });
}

std::string dims(const OpContext& op) {
  std::string text;
  for (size_t d = 0; d < op.input_shape(0).size(); ++d) {
    text += concat("a", d, " ");
  }
  return text;
}

const RegisterOp kLambDirection{{
    .name = "LambDirection",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      for (int i = 1; i < 4; ++i) {
        TRAINRT_REQUIRE(op.input_type(i) == op.input_type(0),
                        kInvalidModel,
                        "LambDirection: input ",
                        i,
                        " differs from the parameter");
      }
      return {op.input_type(0), op.input_type(0), op.input_type(0)};
    },
    .cost = [](const OpContext& op) { return optimizer::cost(op, 18); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      const std::string d = dims(op);
      return Factors(op, d + "," + d + "," + d + "," + d + ",,->" + d + "," + d + "," + d);
    },
    .reference_kernel = direction_kernel,
    .not_differentiable = true,
    .inplace = {{1, 2, true}, {2, 3, true}},
    .examples =
        {{.name = "decay",
          .attributes = {{"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-6}, {"weight_decay", 0.01}},
          .inputs = {{DType::kFloat32, {4, 6}},
                     {DType::kFloat32, {4, 6}},
                     {DType::kFloat32, {4, 6}},
                     {DType::kFloat32, {4, 6}},
                     {DType::kFloat32, {}},
                     {DType::kInt64, {}}},
          .values = {Tensor{},
                     Tensor{},
                     Tensor{},
                     Tensor{},
                     Tensor::scalar<float>(0.5f),
                     Tensor::scalar<int64_t>(3)},
          .low = 0.1,
          .high = 1}},
}};

const RegisterOp kLambApply{{
    .name = "LambApply",
    .infer_types = [](const OpContext& op) -> TensorTypes { return {op.input_type(0)}; },
    .cost = [](const OpContext& op) { return optimizer::cost(op, 2); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      const std::string d = dims(op);
      return Factors(op, d + "," + d + ",,,,->" + d);
    },
    .reference_kernel = apply_kernel,
    .not_differentiable = true,
    .inplace = {{0, 0, true}},
    .examples = {{.name = "ratio",
                  .inputs = {{DType::kFloat32, {4, 6}},
                             {DType::kFloat32, {4, 6}},
                             {DType::kFloat64, {}},
                             {DType::kFloat64, {}},
                             {DType::kFloat32, {}},
                             {DType::kFloat32, {}}},
                  .low = 0.1,
                  .high = 1}},
}};

}  // namespace

}  // namespace trainrt
