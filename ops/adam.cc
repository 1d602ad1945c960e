// Adam (Kingma & Ba, arXiv 1412.6980, algorithm 1) and AdamW (Loshchilov & Hutter, arXiv
// 1711.05101, algorithm 2), with PyTorch's placement of eps:
//   m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2
//   p <- p - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
// Adam adds weight_decay * p to g; AdamW shrinks p by 1 - lr * weight_decay before the step
// instead.
#include "ops/optimizer_kernel.h"

namespace trainrt {

namespace {

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

const RegisterOp kAdam{adam_def("Adam", optimizer::kernel<optimizer::Adam>)};
const RegisterOp kAdamW{adam_def("AdamW", optimizer::kernel<optimizer::AdamW>)};

}  // namespace

}  // namespace trainrt
