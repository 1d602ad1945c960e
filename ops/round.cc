// Floor, Ceil and Round (half to even). Their derivative is 0 wherever there is one, so they stop
// the gradient.
#include "ops/round.h"

#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

template <typename F>
OpDef rounding(const char* name) {
  OpDef op = unary_op<F>(name);
  op.not_differentiable = true;
  op.examples = {unary_example(-4, 4)};
  return op;
}

const RegisterOp kFloor{rounding<Floor>("Floor")};
const RegisterOp kCeil{rounding<Ceil>("Ceil")};
const RegisterOp kRound{rounding<Round>("Round")};

}  // namespace

}  // namespace trainrt
