// Hardmax: 1 at the first maximum along `axis`, 0 elsewhere. Before opset 13 the axis and all after
// it are one.
#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

void upgrade(UpgradeContext& u) {
  const Shape shape = u.shape(u.input(0));
  const int ndim = static_cast<int>(shape.size());
  const bool flat = u.opset() < 13;
  const int axis = normalize_axis(u.attributes().get_int("axis", flat ? 1 : -1), ndim);
  ValueId x = u.input(0);
  int64_t along = axis;
  if (flat) {
    x = u.reshape(x, {dims_product(shape, 0, axis), dims_product(shape, axis, ndim)});
    along = 1;
  }
  const int64_t depth = u.shape(x).at(static_cast<size_t>(along));
  const ValueId first = u.op("ArgMax", {x}, {{"axis", along}, {"keepdims", int64_t{0}}});
  const ValueId values = u.constant(Tensor::from<double>({0, 1}, {2}).cast(u.dtype(x)));
  const ValueId y = u.op("OneHot", {first, values}, {{"axis", along}, {"depth", depth}});
  u.set_output(0, flat ? u.reshape(y, shape) : y);
}

const RegisterUpgrade kHardmax{"Hardmax", upgrade};

}  // namespace

}  // namespace trainrt
