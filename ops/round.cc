// Floor, Ceil and Round (half to even). Their derivative is 0 wherever there is one, so they stop
// the gradient.
#include <cmath>

#include "graph/op_def.h"
#include "ops/elementwise.h"

namespace trainrt {

namespace {

struct Floor {
  template <typename T>
  T operator()(T x) const {
    return std::floor(x);
  }
};

struct Ceil {
  template <typename T>
  T operator()(T x) const {
    return std::ceil(x);
  }
};

struct Round {
  template <typename T>
  T operator()(T x) const {
    return std::rint(x);
  }
};

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
