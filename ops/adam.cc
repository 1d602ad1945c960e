// Adam (Kingma & Ba, arXiv 1412.6980, algorithm 1) and AdamW (Loshchilov & Hutter, arXiv
// 1711.05101, algorithm 2), with PyTorch's placement of eps:
//   m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
//   p <- p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
// Adam adds weight_decay * p to g; AdamW shrinks p by 1 - lr * weight_decay before the step
// instead.
#include "ops/optimizer_kernel.h"

namespace trainrt {

namespace {

template <bool kDecoupled>
void adam_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const Attributes& a = k.attributes();
    const double b1 = a.get_float("beta1");
    const double b2 = a.get_float("beta2");
    const double decay = a.get_float("weight_decay", 0);
    const double lr = optimizer::scalar_input(k, 4);
    const double scale = optimizer::scalar_input(k, 5);
    const double step = optimizer::scalar_input(k, 6);
    const T beta1 = static_cast<T>(b1);
    const T beta2 = static_cast<T>(b2);
    const T rest1 = static_cast<T>(1 - b1);
    const T rest2 = static_cast<T>(1 - b2);
    const T step_size = static_cast<T>(lr / (1 - std::pow(b1, step)));
    const T v_factor = static_cast<T>(1 / std::sqrt(1 - std::pow(b2, step)));
    const T eps = static_cast<T>(a.get_float("eps"));
    const T keep = static_cast<T>(kDecoupled ? 1 - lr * decay : 1);
    const T l2 = static_cast<T>(kDecoupled ? 0 : decay);
    const T s = static_cast<T>(scale);
    T* __restrict__ param = k.output<T>(0);
    T* __restrict__ first = k.output<T>(1);
    T* __restrict__ second = k.output<T>(2);
    const T* __restrict__ grad = k.input<T>(1);
    optimizer::update(k, scale, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T p = param[i] * keep;
        const T g = grad[i] * s + l2 * param[i];
        const T m = beta1 * first[i] + rest1 * g;
        const T v = beta2 * second[i] + rest2 * g * g;
        first[i] = m;
        second[i] = v;
        param[i] = p - step_size * m / (std::sqrt(v) * v_factor + eps);
      }
    });
  });
}

OpDef adam_def(const char* name, Kernel kernel) {
  return {
      .name = name,
      .infer_types = [](const OpContext& op) { return optimizer::infer(op, 2); },
      .cost = [](const OpContext& op) { return optimizer::cost(op, 18); },
      .sharding = [](const OpContext& op) { return optimizer::sharding(op, 2); },
      .reference_kernel = std::move(kernel),
      .not_differentiable = true,
      .inplace = optimizer::inplace(2),
      .examples = {optimizer::example(
          "decay", {{"beta1", 0.9}, {"beta2", 0.999}, {"eps", 1e-8}, {"weight_decay", 0.01}}, 2)},
  };
}

const RegisterOp kAdam{adam_def("Adam", adam_kernel<false>)};
const RegisterOp kAdamW{adam_def("AdamW", adam_kernel<true>)};

}  // namespace

}  // namespace trainrt
