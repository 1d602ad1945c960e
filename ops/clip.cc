// Clip between constants `min` and `max` (attributes; either may be absent). The derivative at a
// bound is 1, so that a value that starts there can move. Bounds that are computed become Max and
// Min.
#include "ops/clip.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

// Bounds: attributes before opset 11, with the float range as default, then inputs.
void upgrade_clip(UpgradeContext& context) {
  Attributes bounds;
  if (context.opset() < 11) {
    for (const char* name : {"min", "max"}) {
      if (context.attributes().has(name)) {
        bounds.set(name, context.attributes().get_float(name));
      }
    }
    context.set_outputs(context.emit("Clip", {context.input(0)}, bounds));
    return;
  }
  bool known = true;
  for (int i = 1; i <= 2; ++i) {
    if (context.has_input(i)) {
      known = known && context.constant_input(i).has_value();
    }
  }
  if (known) {
    for (int i = 1; i <= 2; ++i) {
      if (context.has_input(i)) {
        bounds.set(i == 1 ? "min" : "max", context.float_input(i));
      }
    }
    context.set_outputs(context.emit("Clip", {context.input(0)}, bounds));
    return;
  }
  ValueId x = context.input(0);
  if (context.has_input(1)) {
    x = context.op("Max", {x, context.input(1)});
  }
  if (context.has_input(2)) {
    x = context.op("Min", {x, context.input(2)});
  }
  context.set_outputs(context.emit("Identity", {x}));
}

OpDef clip_op() {
  OpDef op = unary_op<Clip, Numbers::kNumeric>("Clip");
  op.upgrade = upgrade_clip;
  op.gradient = gradient_from_input("ClipGrad");
  op.examples = {unary_example(-1, 1, {{"min", -0.5}, {"max", 0.25}}),
                 unary_example(-4, 10, {{"min", 0.0}, {"max", 6.0}}),
                 unary_example(-1, 1, {{"max", 0.5}})};
  op.examples[1].name = "relu6";
  op.examples[2].name = "one bound";
  return op;
}

OpDef clip_grad_op() {
  OpDef op = unary_grad_op<ClipGrad>("ClipGrad");
  op.examples = {grad_example(-1, 1, {{"min", -0.5}, {"max", 0.25}})};
  return op;
}

const RegisterOp kClip{clip_op()};
const RegisterOp kClipGrad{clip_grad_op()};

}  // namespace

}  // namespace trainrt
