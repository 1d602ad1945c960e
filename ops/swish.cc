// Swish: x sigmoid(alpha x) (opset 24; SiLU for alpha 1, QuickGelu for 1.702), and its gradient
// from (x, dy). Fusion: Mul(x, Sigmoid(x)) and Mul(x, Sigmoid(Mul(x, constant))).
#include "ops/swish.h"

#include "graph/autodiff.h"
#include "graph/passes/fusion.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

OpDef swish_op() {
  OpDef op = unary_op<Swish>("Swish");
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 8); };
  op.gradient = gradient_from_input("SwishGrad");
  op.cheap = true;
  op.examples = {unary_example(-4, 4), unary_example(-4, 4, {{"alpha", 1.702}})};
  op.examples[1].name = "quick_gelu";
  return op;
}

OpDef swish_grad_op() {
  OpDef op = unary_grad_op<SwishGrad>("SwishGrad");
  op.examples = {grad_example(-4, 4, {{"alpha", 1.702}})};
  return op;
}

bool fuse(FusionContext& f) {
  const ValueId y = f.graph().node(f.root()).outputs[0];
  const std::vector<ValueId> factors = f.graph().node(f.root()).inputs;
  for (const size_t i : {0u, 1u}) {
    const ValueId x = factors[1 - i];
    const NodeId sigmoid = f.producer(factors[i], "Sigmoid");
    if (sigmoid == kNoNode || !f.single_use(factors[i])) {
      continue;
    }
    const ValueId argument = f.graph().node(sigmoid).inputs[0];
    if (argument == x) {
      f.replace(y, f.op("Swish", {x}, {{"alpha", 1.0}}));
      return true;
    }
    const NodeId mul = f.producer(argument, "Mul");
    if (mul == kNoNode || !f.single_use(argument)) {
      continue;
    }
    const ValueId constant = f.other_operand(mul, [&](ValueId id) { return id == x; });
    if (const std::optional<double> alpha = f.scalar_constant(constant)) {
      f.replace(y, f.op("Swish", {x}, {{"alpha", *alpha}}));
      return true;
    }
  }
  return false;
}

void upgrade_quick_gelu(UpgradeContext& u) {
  u.set_outputs(
      u.emit("Swish", {u.input(0)}, {{"alpha", u.attributes().get_float("alpha", 1.702)}}));
}

const RegisterOp kSwish{swish_op()};
const RegisterOp kSwishGrad{swish_grad_op()};
const RegisterUpgrade kQuickGelu{"com.microsoft", "QuickGelu", upgrade_quick_gelu};
const RegisterFusion kSwishFusion{{"Swish", "Mul", 10, fuse}};

}  // namespace

}  // namespace trainrt
