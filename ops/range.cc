// Operators whose result is known when the model is imported, or whose shape depends on data and so
// must be: Range, NonZero and Compress (with a constant condition). They become constants, or a
// Gather.
#include <algorithm>
#include <cmath>

#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

void upgrade_range(UpgradeContext& context) {
  const DType dtype = context.dtype(context.input(0));
  const double start = context.float_input(0), limit = context.float_input(1),
               delta = context.float_input(2);
  if (delta == 0) {
    context.fail("delta must not be 0");
  }
  const int64_t n = std::max<int64_t>(0, static_cast<int64_t>(std::ceil((limit - start) / delta)));
  Tensor values(DType::kFloat64, {n});
  for (int64_t i = 0; i < n; ++i) {
    values.data<double>()[i] = start + static_cast<double>(i) * delta;
  }
  context.set_output(0, context.constant(values.cast(dtype), context.node_name()));
}

// Positions of the true elements: one row per dim, in row-major order.
void upgrade_non_zero(UpgradeContext& context) {
  const std::optional<Tensor> input = context.constant_input(0);
  if (!input) {
    context.fail("the shape of the result depends on data; shapes must be known");
  }
  const std::vector<double> values = input->to_double();
  const Shape strides = row_major_strides(input->shape());
  std::vector<int64_t> rows;
  for (size_t d = 0; d < strides.size(); ++d) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] != 0) {
        rows.push_back(static_cast<int64_t>(i) / strides[d] % input->shape()[d]);
      }
    }
  }
  const int64_t count =
      static_cast<int64_t>(values.size()) - std::count(values.begin(), values.end(), 0.0);
  const int64_t ndim = static_cast<int64_t>(strides.size());
  context.set_output(0, context.constant(Tensor::from(rows, {ndim, count}), context.node_name()));
}

void upgrade_compress(UpgradeContext& context) {
  const std::optional<Tensor> condition = context.constant_input(1);
  if (!condition) {
    context.fail("the shape of the result depends on data; shapes must be known");
  }
  const std::vector<int64_t> keep = condition->to_int64();
  std::vector<int64_t> positions;
  for (size_t i = 0; i < keep.size(); ++i) {
    if (keep[i] != 0) {
      positions.push_back(static_cast<int64_t>(i));
    }
  }
  ValueId input = context.input(0);
  int64_t axis = context.attributes().get_int("axis", 0);
  if (!context.attributes().has("axis")) {
    input = context.reshape(input, {num_elements(context.shape(input))});
  }
  const Shape shape = context.shape(input);
  const int64_t size =
      shape.at(static_cast<size_t>(normalize_axis(axis, static_cast<int>(shape.size()))));
  TRAINRT_REQUIRE(static_cast<int64_t>(keep.size()) <= size,
                  kInvalidModel,
                  "the condition has ",
                  keep.size(),
                  " elements for an axis of size ",
                  size);
  const int64_t count = static_cast<int64_t>(positions.size());
  const ValueId indices = context.constant(Tensor::from(positions, {count}));
  context.set_outputs(context.emit("Gather", {input, indices}, {{"axis", axis}}));
}

const RegisterUpgrade kRange{"Range", upgrade_range};
const RegisterUpgrade kNonZero{"NonZero", upgrade_non_zero};
const RegisterUpgrade kCompress{"Compress", upgrade_compress};

}  // namespace

}  // namespace trainrt
