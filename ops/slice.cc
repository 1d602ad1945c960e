// Slice: starts, ends and steps for some axes. Ours are normalised: 0 <= start < dim, an axis is
// listed once, and only if it is really cut; a negative step runs down to `end`, which may be -1
// there. The gradient (SliceGrad) writes dy into a tensor of zeros.
#include "ops/slice.h"

#include <algorithm>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/localize.h"

namespace trainrt {

namespace {

int64_t slice_size(int64_t start, int64_t end, int64_t step) {
  const int64_t count =
      step > 0 ? (end - start + step - 1) / step : (start - end - step - 1) / -step;
  return std::max<int64_t>(0, count);
}

Shape sliced_shape(const Attributes& attributes, Shape shape) {
  const std::vector<int64_t>& axes = attributes.get_ints("axes");
  const std::vector<int64_t>& starts = attributes.get_ints("starts");
  const std::vector<int64_t>& ends = attributes.get_ints("ends");
  const std::vector<int64_t>& steps = attributes.get_ints("steps");
  TRAINRT_REQUIRE(
      starts.size() == axes.size() && ends.size() == axes.size() && steps.size() == axes.size(),
      kInvalidModel,
      "Slice wants starts, ends and steps for each of ",
      axes.size(),
      " axes");
  for (size_t i = 0; i < axes.size(); ++i) {
    TRAINRT_REQUIRE(steps[i] != 0, kInvalidModel, "Slice has a step of 0 along axis ", axes[i]);
    int64_t& dim = shape.at(static_cast<size_t>(axes[i]));
    const int64_t size = slice_size(starts[i], ends[i], steps[i]);
    TRAINRT_REQUIRE(
        size == 0 || (starts[i] >= 0 && starts[i] < dim && starts[i] + (size - 1) * steps[i] >= 0 &&
                      starts[i] + (size - 1) * steps[i] < dim),
        kInvalidModel,
        "slice [",
        starts[i],
        ":",
        ends[i],
        ":",
        steps[i],
        "] is outside of dim ",
        axes[i],
        " of size ",
        dim);
    dim = size;
  }
  return shape;
}

void slice_kernel(KernelContext& context) {
  const int64_t bytes = dtype_bytes(context.output_dtype(0));
  const Shape& out = context.output_shape(0);
  strided_copy(
      context,
      bytes,
      out,
      {context.raw_output(0), row_major_strides(out)},
      view_of_slice(context.attributes(), context.input_shape(0), context.raw_input(0), bytes));
}

void slice_grad_kernel(KernelContext& context) {
  const int64_t bytes = dtype_bytes(context.output_dtype(0));
  const Shape& dy = context.input_shape(0);
  clear_output(context);
  strided_copy(
      context,
      bytes,
      dy,
      view_of_slice(context.attributes(), context.output_shape(0), context.raw_output(0), bytes),
      {context.raw_input(0), row_major_strides(dy)});
}

// Dims that are cut are whole, all others parallel.
ShardingRule slice_sharding(const OpContext& op) {
  const Shape& shape = op.output_shape(0);
  const std::vector<int64_t>& axes = op.attributes().get_ints("axes");
  ShardingRule rule;
  TensorFactors factors(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    if (std::find(axes.begin(), axes.end(), static_cast<int64_t>(d)) == axes.end()) {
      factors[d] = {static_cast<int>(rule.factors.size())};
      rule.factors.push_back({concat("d", d), shape[d]});
    }
  }
  rule.inputs = {factors};
  rule.outputs = {factors};
  rule.linear = {{0}};
  return rule;
}

struct Cut {
  std::vector<int64_t> starts, ends, axes, steps;
};

// ONNX's numbers (negative ones count from the end, large ones mean the end) in our form.
Cut normalize(const Cut& given, const Shape& shape) {
  Cut cut;
  for (size_t i = 0; i < given.axes.size(); ++i) {
    const int axis = normalize_axis(given.axes[i], static_cast<int>(shape.size()));
    const int64_t dim = shape[static_cast<size_t>(axis)];
    TRAINRT_REQUIRE(given.steps[i] != 0, kInvalidModel, "Slice has a step of 0 along axis ", axis);
    TRAINRT_REQUIRE(std::find(cut.axes.begin(), cut.axes.end(), axis) == cut.axes.end(),
                    kInvalidModel,
                    "Slice cuts axis ",
                    axis,
                    " twice");
    // A step beyond the dim takes the first element alone, however large it is.
    const int64_t step = std::clamp<int64_t>(given.steps[i], -dim - 1, dim + 1);
    const int64_t low = step > 0 ? 0 : -1, high = step > 0 ? dim : dim - 1;
    const auto bound = [&](int64_t index) {
      // Added only where it cannot overflow: INT64_MIN and INT64_MAX are usual values.
      return std::clamp(index < 0 && index > -dim - 2 ? index + dim : index, low, high);
    };
    const int64_t start = bound(given.starts[i]);
    // -1 - dim and below end before the first element also after adding dim.
    const int64_t end = given.ends[i] < -dim ? low : bound(given.ends[i]);
    if (start == 0 && step == 1 && end == dim) {
      continue;
    }
    cut.axes.push_back(axis);
    cut.starts.push_back(std::max<int64_t>(start, 0));
    cut.ends.push_back(slice_size(start, end, step) == 0 ? std::max<int64_t>(start, 0) : end);
    cut.steps.push_back(step);
  }
  return cut;
}

void upgrade_slice(UpgradeContext& context) {
  const Shape& shape = context.shape(context.input(0));
  Cut cut;
  if (context.opset() < 10) {
    cut.starts = context.attributes().get_ints("starts");
    cut.ends = context.attributes().get_ints("ends");
    cut.axes = context.attributes().get_ints("axes", {});
  } else {
    cut.starts = context.int_input(1);
    cut.ends = context.int_input(2);
    cut.axes = context.has_input(3) ? context.int_input(3) : std::vector<int64_t>{};
    cut.steps = context.has_input(4) ? context.int_input(4) : std::vector<int64_t>{};
  }
  for (size_t i = cut.axes.size(); i < cut.starts.size(); ++i) {
    cut.axes.push_back(static_cast<int64_t>(i));
  }
  cut.steps.resize(cut.starts.size(), 1);
  if (cut.ends.size() != cut.starts.size() || cut.axes.size() != cut.starts.size()) {
    context.fail("starts, ends, axes and steps differ in length");
  }
  cut = normalize(cut, shape);
  if (cut.axes.empty()) {
    context.set_outputs(context.emit("Identity", {context.input(0)}));
    return;
  }
  context.set_outputs(context.emit(
      "Slice",
      {context.input(0)},
      {{"starts", cut.starts}, {"ends", cut.ends}, {"axes", cut.axes}, {"steps", cut.steps}}));
}

using Ints = std::vector<int64_t>;

OpExample example(std::string name, Shape shape, const Cut& cut) {
  OpExample slice;
  slice.name = std::move(name);
  slice.attributes = {
      {"starts", cut.starts}, {"ends", cut.ends}, {"axes", cut.axes}, {"steps", cut.steps}};
  slice.inputs = {{DType::kFloat32, std::move(shape)}};
  return slice;
}

std::vector<OpExample> slice_examples() {
  return {example("columns", {6, 4, 20}, {Ints{3}, Ints{9}, Ints{2}, Ints{1}}),
          example("rows with a step", {9, 6}, {Ints{1}, Ints{9}, Ints{0}, Ints{3}}),
          example("backwards", {4, 7}, {Ints{6}, Ints{-1}, Ints{1}, Ints{-2}}),
          example("two axes", {6, 5, 7}, {Ints{1, 2}, Ints{4, 6}, Ints{1, 2}, Ints{1, 2}})};
}

OpDef slice_op() {
  OpDef op;
  op.name = "Slice";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    return {{context.input_dtype(0), sliced_shape(context.attributes(), context.input_shape(0))}};
  };
  op.cost = [](const OpContext& context) {
    Cost cost = memory_bound_cost(context, 0);
    cost.bytes = 2.0 * static_cast<double>(context.output_bytes());  // reads what it writes
    return cost;
  };
  op.sharding = slice_sharding;
  op.gradient = [](GradientBuilder& g) {
    Attributes attributes = g.attributes();
    attributes.set("shape", g.input_shape(0));
    g.set_input_grad(0, g.op("SliceGrad", {g.output_grad(0)}, attributes));
  };
  op.upgrade = upgrade_slice;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = slice_kernel;
  op.examples = slice_examples();
  return op;
}

OpDef slice_grad_op() {
  OpDef op;
  op.name = "SliceGrad";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    const Shape& shape = context.attributes().get_ints("shape");
    TRAINRT_REQUIRE(sliced_shape(context.attributes(), shape) == context.input_shape(0),
                    kInvalidModel,
                    "the slice of ",
                    shape_string(shape),
                    " is not ",
                    shape_string(context.input_shape(0)));
    return {{context.input_dtype(0), shape}};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = slice_sharding;
  op.localize = [](const OpContext& context, const FactorShard& shard) {
    return localize_output_shape(context, shard, "shape");
  };
  op.gradient = [](GradientBuilder& g) {
    Attributes attributes = g.attributes();
    attributes.erase("shape");
    g.set_input_grad(0, g.op("Slice", {g.output_grad(0)}, attributes));
  };
  op.cheap = true;
  op.reference_kernel = slice_grad_kernel;
  for (OpExample slice : slice_examples()) {
    const Shape whole = slice.inputs[0].shape;
    slice.inputs[0].shape = sliced_shape(slice.attributes, whole);
    slice.attributes.set("shape", whole);
    op.examples.push_back(slice);
  }
  return op;
}

const RegisterOp kSlice{slice_op()};
const RegisterOp kSliceGrad{slice_grad_op()};

}  // namespace

}  // namespace trainrt
