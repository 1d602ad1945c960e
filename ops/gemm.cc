// ONNX Gemm, all opsets: y = alpha * op(a) . op(b) + beta * c, rewritten to MatMul, Mul and Add. c
// broadcasts (before opset 7 only with broadcast = 1, which says the same) and may be absent.
#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

void upgrade(UpgradeContext& u) {
  const double alpha = u.attributes().get_float("alpha", 1);
  const double beta = u.attributes().get_float("beta", 1);
  Attributes attributes;
  for (const auto& [onnx, ours] :
       {std::pair{"transA", "trans_a"}, std::pair{"transB", "trans_b"}}) {
    if (u.attributes().get_int(onnx, 0) != 0) {
      attributes.set(ours, int64_t{1});
    }
  }
  if (u.ndim(u.input(0)) != 2 || u.ndim(u.input(1)) != 2) {
    u.fail(concat("a and b must be matrices, got ",
                  shape_string(u.shape(u.input(0))),
                  " and ",
                  shape_string(u.shape(u.input(1)))));
  }
  ValueId y = u.emit("MatMul", {u.input(0), u.input(1)}, attributes).at(0);
  if (alpha != 1) {
    y = u.mul(y, alpha);
  }
  if (u.has_input(2) && beta != 0) {
    const ValueId c = beta == 1 ? u.input(2) : u.mul(u.input(2), beta);
    y = u.add(y, c);
  }
  u.set_output(0, y);
}

const RegisterUpgrade kGemm{"Gemm", upgrade};

}  // namespace

}  // namespace trainrt
