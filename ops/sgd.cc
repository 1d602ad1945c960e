// Plain gradient descent and its momentum forms, as torch.optim.SGD has them:
//   g <- s g + weight_decay p;   Momentum: b <- momentum b + g, then g <- b, or g + momentum b with
//   nesterov;   p <- p - lr g.
// PyTorch starts b at the first g; from b = 0 that is the same.
#include "ops/optimizer_kernel.h"

namespace trainrt {

namespace {

void sgd_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const double scale = optimizer::scalar_input(k, 3);
    const T s = static_cast<T>(scale);
    const T decay = static_cast<T>(k.attributes().get_float("weight_decay", 0));
    const T lr = static_cast<T>(optimizer::scalar_input(k, 2));
    T* param = k.output<T>(0);
    const T* grad = k.input<T>(1);
    optimizer::update(k, scale, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        param[i] -= lr * (grad[i] * s + decay * param[i]);
      }
    });
  });
}

void momentum_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const double scale = optimizer::scalar_input(k, 4);
    const T s = static_cast<T>(scale);
    const T decay = static_cast<T>(k.attributes().get_float("weight_decay", 0));
    const T momentum = static_cast<T>(k.attributes().get_float("momentum"));
    const bool nesterov = k.attributes().get_int("nesterov", 0) != 0;
    const T lr = static_cast<T>(optimizer::scalar_input(k, 3));
    T* param = k.output<T>(0);
    T* buffer = k.output<T>(1);
    const T* grad = k.input<T>(1);
    optimizer::update(k, scale, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T g = grad[i] * s + decay * param[i];
        const T b = momentum * buffer[i] + g;
        buffer[i] = b;
        param[i] -= lr * (nesterov ? g + momentum * b : b);
      }
    });
  });
}

const RegisterOp kSgd{{
    .name = "Sgd",
    .infer_types = [](const OpContext& op) { return optimizer::infer(op, 0); },
    .cost = [](const OpContext& op) { return optimizer::cost(op, 5); },
    .sharding = [](const OpContext& op) { return optimizer::sharding(op, 0); },
    .reference_kernel = sgd_kernel,
    .not_differentiable = true,
    .inplace = optimizer::inplace(0),
    .examples = {optimizer::example("decay", {{"weight_decay", 0.1}}, 0)},
}};

const RegisterOp kMomentum{{
    .name = "Momentum",
    .infer_types = [](const OpContext& op) { return optimizer::infer(op, 1); },
    .cost = [](const OpContext& op) { return optimizer::cost(op, 8); },
    .sharding = [](const OpContext& op) { return optimizer::sharding(op, 1); },
    .reference_kernel = momentum_kernel,
    .not_differentiable = true,
    .inplace = optimizer::inplace(1),
    .examples = {optimizer::example("plain", {{"momentum", 0.9}}, 1),
                 optimizer::example("nesterov", {{"momentum", 0.9}, {"nesterov", int64_t{1}}}, 1)},
}};

}  // namespace

}  // namespace trainrt
