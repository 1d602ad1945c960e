// LpNormalization: x over its L1 or L2 norm along `axis`; a line of zeros stays one.
#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

void upgrade(UpgradeContext& u) {
  const ValueId x = u.input(0);
  const int64_t p = u.attributes().get_int("p", 2);
  if (p != 1 && p != 2) {
    u.fail(concat("p is ", p, ", wanted 1 or 2"));
  }
  const std::vector<int64_t> axes = {normalize_axis(u.attributes().get_int("axis", -1), u.ndim(x))};
  const ValueId norm =
      u.op(p == 1 ? "ReduceL1" : "ReduceL2", {x}, {{"axes", axes}, {"keepdims", int64_t{1}}});
  const ValueId is_zero = u.op("Equal", {norm, u.scalar(0, u.dtype(x))});
  const ValueId divisor = u.where(is_zero, u.scalar(1, u.dtype(x)), norm);
  u.set_outputs(u.emit("Div", {x, divisor}));
}

const RegisterUpgrade kLpNormalization{"LpNormalization", upgrade};

}  // namespace

}  // namespace trainrt
