// QuantizeLinear: y = saturate(round(x / scale) + zero_point), to even on ties, and
// DequantizeLinear: y = (x - zero_point) * scale; per tensor or along `axis`. Blocks (opset 21) are
// refused.
#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

// scale or zero point, shaped to broadcast along the axis.
ValueId along_axis(UpgradeContext& u, ValueId operand, const Shape& x) {
  const Shape shape = u.shape(operand);
  if (num_elements(shape) == 1) {
    return u.reshape(operand, {});
  }
  const int axis = normalize_axis(u.attributes().get_int("axis", 1), static_cast<int>(x.size()));
  if (u.attributes().get_int("block_size", 0) != 0 ||
      shape != Shape{x[static_cast<size_t>(axis)]}) {
    u.fail(concat("scale ",
                  shape_string(shape),
                  " for ",
                  shape_string(x),
                  "; wanted one per tensor or one per element of the axis"));
  }
  Shape aligned(x.size(), 1);
  aligned[static_cast<size_t>(axis)] = shape[0];
  return u.reshape(operand, aligned);
}

void upgrade_dequantize(UpgradeContext& u) {
  const Shape x = u.shape(u.input(0));
  const ValueId scale = along_axis(u, u.input(1), x);
  ValueId y = u.cast(u.input(0), u.dtype(scale));
  if (u.has_input(2)) {
    y = u.sub(y, u.cast(along_axis(u, u.input(2), x), u.dtype(scale)));
  }
  u.set_outputs(u.emit("Mul", {y, scale}));
}

struct Range {
  double low, high;
};

Range range_of(UpgradeContext& u, DType dtype) {
  switch (dtype) {
    case DType::kUInt8:
      return {0, 255};
    case DType::kInt8:
      return {-128, 127};
    case DType::kUInt16:
      return {0, 65535};
    case DType::kInt16:
      return {-32768, 32767};
    default:
      u.fail(concat("quantizing to ", dtype_name(dtype), " is not supported"));
  }
}

void upgrade_quantize(UpgradeContext& u) {
  const ValueId x = u.input(0);
  const Shape shape = u.shape(x);
  const DType to = u.has_input(2) ? u.dtype(u.input(2)) : DType::kUInt8;
  const Range range = range_of(u, to);
  ValueId y = u.op("Round", {u.div(x, along_axis(u, u.input(1), shape))});
  if (u.has_input(2)) {
    y = u.add(y, u.cast(along_axis(u, u.input(2), shape), u.dtype(x)));
  }
  y = u.op("Clip", {y}, {{"min", range.low}, {"max", range.high}});
  u.set_outputs(u.emit("Cast", {y}, {{"to", std::string(dtype_name(to))}}));
}

const RegisterUpgrade kQuantize{"QuantizeLinear", upgrade_quantize};
const RegisterUpgrade kDequantize{"DequantizeLinear", upgrade_dequantize};

}  // namespace

}  // namespace trainrt
