// Plain gradient descent and its momentum forms, as torch.optim.SGD has them:
//   g <- s g + weight_decay p;   Momentum: b <- momentum b + g, then g <- b, or g + momentum b with
//   nesterov;   p <- p - lr g.
// PyTorch starts b at the first g; from b = 0 that is the same.
#include "ops/optimizer_kernel.h"

namespace trainrt {

namespace {

const RegisterOp kSgd{{
    .name = "Sgd",
    .infer_types = [](const OpContext& op) { return optimizer::infer(op, 0); },
    .cost = [](const OpContext& op) { return optimizer::cost(op, 5); },
    .sharding = [](const OpContext& op) { return optimizer::sharding(op, 0); },
    .reference_kernel = optimizer::kernel<optimizer::Sgd>,
    .not_differentiable = true,
    .inplace = optimizer::inplace(0),
    .examples = {optimizer::example("decay", {{"weight_decay", 0.1}}, 0)},
}};

const RegisterOp kMomentum{{
    .name = "Momentum",
    .infer_types = [](const OpContext& op) { return optimizer::infer(op, 1); },
    .cost = [](const OpContext& op) { return optimizer::cost(op, 8); },
    .sharding = [](const OpContext& op) { return optimizer::sharding(op, 1); },
    .reference_kernel = optimizer::kernel<optimizer::Momentum>,
    .not_differentiable = true,
    .inplace = optimizer::inplace(1),
    .examples = {optimizer::example("plain", {{"momentum", 0.9}}, 1),
                 optimizer::example("nesterov", {{"momentum", 0.9}, {"nesterov", int64_t{1}}}, 1)},
}};

}  // namespace

}  // namespace trainrt
