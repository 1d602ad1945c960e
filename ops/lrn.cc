// ONNX LRN (local response normalization across channels; Krizhevsky et al., 2012), rewritten at
// import: y = x / (bias + alpha / size * sum of x^2 over `size` neighbouring channels)^beta. The
// sum is an average pool over the channel axis, seen as the one spatial dim of [n, 1, c, rest].
#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

void upgrade(UpgradeContext& u) {
  const ValueId x = u.input(0);
  const Shape shape = u.shape(x);
  const DType dtype = u.dtype(x);
  if (shape.size() < 2) {
    u.fail(concat("x must be [n, c, ...], got ", shape_string(shape)));
  }
  const int64_t size = u.attributes().get_int("size");
  const int64_t rest = dims_product(shape, 2, static_cast<int>(shape.size()));
  const ValueId squares = u.reshape(u.mul(x, x), {shape[0], 1, shape[1], rest});
  // Padding counts, so the average is the sum over size taps divided by size.
  const ValueId average = u.op("AveragePool",
                               {squares},
                               {{"kernel_shape", Shape{size, 1}},
                                {"pads", Shape{(size - 1) / 2, 0, size / 2, 0}},
                                {"count_include_pad", int64_t{1}}});
  const ValueId base =
      u.add(u.mul(u.reshape(average, shape), u.attributes().get_float("alpha", 1e-4)),
            u.attributes().get_float("bias", 1.0));
  const ValueId divisor =
      u.op("Pow", {base, u.scalar(u.attributes().get_float("beta", 0.75), dtype)});
  u.set_outputs(u.emit("Div", {x, divisor}));
}

const RegisterUpgrade kLrn{"LRN", upgrade};

}  // namespace

}  // namespace trainrt
