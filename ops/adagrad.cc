// Adagrad (Duchi et al., JMLR 12, 2011) as torch.optim.Adagrad: h <- h + g^2, p <- p - lr g /
// (sqrt(h) + eps), weight decay added to g.
#include "ops/optimizer_kernel.h"

namespace trainrt {

namespace {

const RegisterOp kAdagrad{{
    .name = "Adagrad",
    .infer_types = [](const OpContext& op) { return optimizer::infer(op, 1); },
    .cost = [](const OpContext& op) { return optimizer::cost(op, 12); },
    .sharding = [](const OpContext& op) { return optimizer::sharding(op, 1); },
    .reference_kernel = optimizer::kernel<optimizer::Adagrad>,
    .not_differentiable = true,
    .inplace = optimizer::inplace(1),
    .examples = {optimizer::example("decay", {{"eps", 1e-8}, {"weight_decay", 0.01}}, 1)},
}};

}  // namespace

}  // namespace trainrt
