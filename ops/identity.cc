// Identity: a copy that the memory plan turns into no copy when its input dies here.
#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"
#include "ops/strided_copy.h"

namespace trainrt {

namespace {

OpDef identity_op() {
  OpDef op;
  op.name = "Identity";
  op.infer_types = [](const OpContext& context) -> TensorTypes { return {context.input_type(0)}; };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{0}});
  };
  op.gradient = [](GradientBuilder& g) { g.set_input_grad(0, g.output_grad(0)); };
  op.upgrade = [](UpgradeContext& context) { context.pass_through(); };
  op.inplace = {{0, 0}};
  op.view = true;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = copy_kernel;
  op.examples = {unary_example(-1, 1)};
  return op;
}

const RegisterOp kIdentity{identity_op()};

}  // namespace

}  // namespace trainrt
