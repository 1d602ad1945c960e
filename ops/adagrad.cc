// Adagrad (Duchi et al., JMLR 12, 2011) as torch.optim.Adagrad: h <- h + g^2, p <- p - lr g /
// (sqrt(h) + eps), weight decay added to g.
#include "ops/optimizer_kernel.h"

namespace trainrt {

namespace {

void adagrad_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const double scale = optimizer::scalar_input(k, 4);
    const T s = static_cast<T>(scale);
    const T decay = static_cast<T>(k.attributes().get_float("weight_decay", 0));
    const T eps = static_cast<T>(k.attributes().get_float("eps"));
    const T lr = static_cast<T>(optimizer::scalar_input(k, 3));
    T* param = k.output<T>(0);
    T* sum = k.output<T>(1);
    const T* grad = k.input<T>(1);
    optimizer::update(k, scale, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T g = grad[i] * s + decay * param[i];
        const T h = sum[i] + g * g;
        sum[i] = h;
        param[i] -= lr * g / (std::sqrt(h) + eps);
      }
    });
  });
}

const RegisterOp kAdagrad{{
    .name = "Adagrad",
    .infer_types = [](const OpContext& op) { return optimizer::infer(op, 1); },
    .cost = [](const OpContext& op) { return optimizer::cost(op, 12); },
    .sharding = [](const OpContext& op) { return optimizer::sharding(op, 1); },
    .reference_kernel = adagrad_kernel,
    .not_differentiable = true,
    .inplace = optimizer::inplace(1),
    .examples = {optimizer::example("decay", {{"eps", 1e-8}, {"weight_decay", 0.01}}, 1)},
}};

}  // namespace

}  // namespace trainrt
