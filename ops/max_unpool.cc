// MaxUnpool: the inverse of MaxPool, given its indices: each element goes back to where it was the
// maximum, all else is 0. Indices are positions in the whole (row-major) unpooled tensor, so it is
// a ScatterElements on the flattened one. An output_shape larger than what was pooled is padded at
// the end of each dim.
#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

void upgrade(UpgradeContext& u) {
  const ValueId x = u.input(0);
  const Shape in = u.shape(x);
  TRAINRT_REQUIRE(in.size() > 2 && u.shape(u.input(1)) == in,
                  kInvalidModel,
                  "x is ",
                  shape_string(in),
                  " and the indices ",
                  shape_string(u.shape(u.input(1))),
                  "; wanted both [N, C, ...]");
  const size_t spatial = in.size() - 2;
  const Shape kernel = u.attributes().get_ints("kernel_shape");
  const Shape strides = u.attributes().get_ints("strides", Shape(spatial, 1));
  const Shape pads = u.attributes().get_ints("pads", Shape(2 * spatial, 0));
  if (kernel.size() != spatial || strides.size() != spatial || pads.size() != 2 * spatial) {
    u.fail(concat("kernel_shape, strides or pads do not fit ", shape_string(in)));
  }
  Shape pooled = in;
  for (size_t d = 0; d < spatial; ++d) {
    pooled[d + 2] = (in[d + 2] - 1) * strides[d] - pads[d] - pads[d + spatial] + kernel[d];
  }
  const int64_t places = num_elements(pooled), count = num_elements(in);
  const ValueId flat = u.op(
      "ScatterElements",
      {u.fill(0, {u.dtype(x), {places}}), u.reshape(u.input(1), {count}), u.reshape(x, {count})},
      {{"axis", int64_t{0}}, {"reduction", std::string("none")}});
  const Shape wanted = u.has_input(2) ? u.int_input(2) : pooled;
  if (wanted.size() != in.size()) {
    u.fail(concat("output_shape is ", shape_string(wanted), " for ", shape_string(in)));
  }
  std::vector<int64_t> more(2 * in.size(), 0);
  for (size_t d = 0; d < in.size(); ++d) {
    more[in.size() + d] = wanted[d] - pooled[d];
  }
  const ValueId y = u.reshape(flat, pooled);
  u.set_output(
      0,
      wanted == pooled
          ? y
          : u.op("Pad", {y}, {{"pads", more}, {"mode", std::string("constant")}, {"value", 0.0}}));
}

const RegisterUpgrade kMaxUnpool{"MaxUnpool", upgrade};

}  // namespace

}  // namespace trainrt
