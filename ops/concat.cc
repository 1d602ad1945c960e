// Concat and Split, which are each other's gradient. Along the axis the pieces have sizes of their
// own, so that dim is whole; all others are parallel.
#include <numeric>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/passes/layout.h"
#include "graph/upgrade.h"
#include "ops/strided_copy.h"

namespace trainrt {

namespace {

// Copies the piece of `dims` that starts at `offset` of dim `axis` of the whole, to or from it.
void copy_piece(KernelContext& context,
                void* piece,
                const Shape& dims,
                void* whole,
                const Shape& whole_shape,
                int axis,
                int64_t offset,
                bool to_whole) {
  const Shape whole_strides = row_major_strides(whole_shape);
  const int64_t bytes = dtype_bytes(context.output_dtype(0));
  void* begin = element_at(whole, offset * whole_strides[static_cast<size_t>(axis)], bytes);
  const StridedView in_whole{begin, whole_strides};
  const StridedView in_piece{piece, row_major_strides(dims)};
  strided_copy(
      context, bytes, dims, to_whole ? in_whole : in_piece, to_whole ? in_piece : in_whole);
}

void concat_kernel(KernelContext& context) {
  const Shape& out = context.output_shape(0);
  const int axis =
      normalize_axis(context.attributes().get_int("axis"), static_cast<int>(out.size()));
  int64_t offset = 0;
  for (int i = 0; i < context.num_inputs(); ++i) {
    const Shape& dims = context.input_shape(i);
    copy_piece(context, context.raw_input(i), dims, context.raw_output(0), out, axis, offset, true);
    offset += dims[static_cast<size_t>(axis)];
  }
}

void split_kernel(KernelContext& context) {
  const Shape& in = context.input_shape(0);
  const int axis =
      normalize_axis(context.attributes().get_int("axis"), static_cast<int>(in.size()));
  const std::vector<int64_t>& sizes = context.attributes().get_ints("split");
  int64_t offset = 0;
  for (int i = 0; i < context.num_outputs(); ++i) {
    if (context.has_output(i)) {
      copy_piece(context,
                 context.raw_output(i),
                 context.output_shape(i),
                 context.raw_input(0),
                 in,
                 axis,
                 offset,
                 false);
    }
    offset += sizes[static_cast<size_t>(i)];
  }
}

TensorTypes concat_types(const OpContext& op) {
  TRAINRT_REQUIRE(op.num_inputs() > 0, kInvalidModel, "Concat without inputs");
  const size_t axis = static_cast<size_t>(op.axis());
  Shape shape = op.input_shape(0);
  shape[axis] = 0;
  for (int i = 0; i < op.num_inputs(); ++i) {
    Shape dims = op.input_shape(i);
    TRAINRT_REQUIRE(dims.size() == shape.size() && op.input_dtype(i) == op.input_dtype(0),
                    kInvalidModel,
                    "Concat of ",
                    dtype_name(op.input_dtype(0)),
                    shape_string(op.input_shape(0)),
                    " and ",
                    dtype_name(op.input_dtype(i)),
                    shape_string(dims));
    std::swap(dims[axis], shape[axis]);
    const int64_t total = dims[axis] + shape[axis];
    shape[axis] = dims[axis];
    TRAINRT_REQUIRE(dims == shape,
                    kInvalidModel,
                    "Concat along axis ",
                    axis,
                    " of ",
                    shape_string(op.input_shape(0)),
                    " and ",
                    shape_string(op.input_shape(i)));
    shape[axis] = total;
  }
  return {{op.input_dtype(0), shape}};
}

TensorTypes split_types(const OpContext& op) {
  const size_t axis = static_cast<size_t>(op.axis());
  const std::vector<int64_t>& sizes = op.attributes().get_ints("split");
  TRAINRT_REQUIRE(
      std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == op.input_shape(0)[axis],
      kInvalidModel,
      "sizes ",
      shape_string(sizes),
      " do not add up to dim ",
      axis,
      " of ",
      shape_string(op.input_shape(0)));
  TensorTypes types;
  for (const int64_t size : sizes) {
    types.push_back(op.input_type(0));
    types.back().shape[axis] = size;
  }
  return types;
}

// Every dim but `axis` is a factor of all tensors.
ShardingRule all_but_axis(const OpContext& op) {
  const Shape& shape = op.input_shape(0);
  const size_t axis = static_cast<size_t>(op.axis());
  ShardingRule rule;
  TensorFactors factors(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    if (d != axis) {
      factors[d] = {static_cast<int>(rule.factors.size())};
      rule.factors.push_back({concat("d", d), shape[d]});
    }
  }
  rule.inputs.assign(static_cast<size_t>(op.num_inputs()), factors);
  rule.outputs.assign(static_cast<size_t>(op.num_outputs()), factors);
  std::vector<int> all(static_cast<size_t>(op.num_inputs()));
  std::iota(all.begin(), all.end(), 0);
  rule.linear = {all};
  return rule;
}

// One wanted piece is a Slice; several are a Split.
void concat_gradient(GradientBuilder& g) {
  const int axis = normalize_axis(g.attributes().get_int("axis"), g.ndim(g.output(0)));
  std::vector<int64_t> sizes;
  int num_wanted = 0;
  for (int i = 0; i < g.num_inputs(); ++i) {
    sizes.push_back(g.input_shape(i)[static_cast<size_t>(axis)]);
    num_wanted += g.needs_grad(i);
  }
  std::vector<ValueId> pieces;
  if (num_wanted > 1) {
    pieces = g.node("Split", {g.output_grad(0)}, {{"axis", int64_t{axis}}, {"split", sizes}});
  }
  int64_t offset = 0;
  for (int i = 0; i < g.num_inputs(); ++i) {
    const int64_t size = sizes[static_cast<size_t>(i)];
    if (g.needs_grad(i)) {
      g.set_input_grad(i,
                       num_wanted > 1 ? pieces[static_cast<size_t>(i)]
                                      : g.op("Slice",
                                             {g.output_grad(0)},
                                             {{"axes", std::vector<int64_t>{axis}},
                                              {"starts", std::vector<int64_t>{offset}},
                                              {"ends", std::vector<int64_t>{offset + size}},
                                              {"steps", std::vector<int64_t>{1}}}));
    }
    offset += size;
  }
}

void split_gradient(GradientBuilder& g) {
  const Shape& in = g.input_shape(0);
  const int axis = normalize_axis(g.attributes().get_int("axis"), static_cast<int>(in.size()));
  const std::vector<int64_t> sizes = g.attributes().get_ints("split");
  std::vector<ValueId> pieces;
  for (int i = 0; i < g.num_outputs(); ++i) {
    ValueId piece = g.output_grad(i);
    if (piece == kNoValue) {
      TensorType type = g.type(g.input(0));
      type.shape[static_cast<size_t>(axis)] = sizes[static_cast<size_t>(i)];
      piece = g.fill(0, type);
    }
    pieces.push_back(piece);
  }
  g.set_input_grad(0, g.op("Concat", pieces, {{"axis", int64_t{axis}}}));
}

void upgrade_split(UpgradeContext& context) {
  const ValueId input = context.input(0);
  const int axis = normalize_axis(context.attributes().get_int("axis", 0), context.ndim(input));
  const int64_t dim = context.shape(input)[static_cast<size_t>(axis)];
  std::vector<int64_t> sizes =
      context.has_input(1) ? context.int_input(1) : context.attributes().get_ints("split", {});
  if (sizes.empty()) {
    // Equal pieces, the last one smaller when it does not come out even.
    const int64_t count = context.attributes().get_int("num_outputs", context.num_outputs());
    TRAINRT_REQUIRE(count == context.num_outputs(),
                    kInvalidModel,
                    "num_outputs is ",
                    count,
                    ", but the node has ",
                    context.num_outputs(),
                    " outputs");
    const int64_t piece = (dim + count - 1) / count;
    for (int64_t i = 0; i < count; ++i) {
      sizes.push_back(std::max<int64_t>(0, std::min(piece, dim - i * piece)));
    }
  }
  context.set_outputs(context.emit("Split", {input}, {{"axis", int64_t{axis}}, {"split", sizes}}));
}

OpDef concat_op() {
  OpDef op;
  op.name = "Concat";
  op.infer_types = concat_types;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = all_but_axis;
  op.gradient = concat_gradient;
  op.upgrade = [](UpgradeContext& context) {
    context.set_outputs(context.emit(
        "Concat", context.inputs(), {{"axis", context.attributes().get_int("axis", 1)}}));
  };
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = concat_kernel;
  OpExample channels;
  channels.name = "channels";
  channels.attributes = {{"axis", int64_t{1}}};
  channels.inputs = {{DType::kFloat32, {6, 2, 5}}, {DType::kFloat32, {6, 3, 5}}};
  OpExample last = channels;
  last.name = "last axis";
  last.attributes = {{"axis", int64_t{-1}}};
  last.inputs = {{DType::kFloat32, {6, 4}}, {DType::kFloat32, {6, 1}}, {DType::kFloat32, {6, 20}}};
  op.examples = {channels, last};
  return op;
}

OpDef split_op() {
  OpDef op;
  op.name = "Split";
  op.infer_types = split_types;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = all_but_axis;
  op.gradient = split_gradient;
  op.upgrade = upgrade_split;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = split_kernel;
  OpExample even;
  even.name = "packed projections";
  even.attributes = {{"axis", int64_t{-1}}, {"split", std::vector<int64_t>{8, 8, 8}}};
  even.inputs = {{DType::kFloat32, {4, 6, 24}}};
  OpExample uneven = even;
  uneven.name = "uneven";
  uneven.attributes = {{"axis", int64_t{0}}, {"split", std::vector<int64_t>{1, 3}}};
  uneven.inputs = {{DType::kFloat32, {4, 6}}};
  op.examples = {even, uneven};
  return op;
}

const RegisterOp kConcat{concat_op()};
const RegisterImageRule kConcatImages{"Concat", {.form = ImageForm::kAxis}};
const RegisterOp kSplit{split_op()};

}  // namespace

}  // namespace trainrt
