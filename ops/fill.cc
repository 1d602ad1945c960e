// Fill: a tensor of one value. ConstantOfShape, EyeLike, Shape, Size and Constant know their result
// when the model is imported, so they become a Fill or a constant.
#include <algorithm>

#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/convert.h"
#include "ops/localize.h"
#include "ops/onnx_dtype.h"

namespace trainrt {

namespace {

constexpr int64_t kGrain = 1 << 15;

void fill_kernel(KernelContext& context) {
  const DType dtype = context.output_dtype(0);
  dispatch_all(dtype, [&](auto tag) {
    using T = decltype(tag);
    const double value = context.attributes().get_float("value");
    T element{};
    convert_elements(DType::kFloat64, &value, dtype, &element, 1);
    T* out = context.output<T>(0);
    context.parallel_for(
        num_elements(context.output_shape(0)), kGrain, [out, element](int64_t begin, int64_t end) {
          std::fill(out + begin, out + end, element);
        });
  });
}

OpDef fill_op() {
  OpDef op;
  op.name = "Fill";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    return {{dtype_attribute(context.attributes().get_string("dtype")),
             context.attributes().get_ints("shape")}};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context);
  };
  op.localize = [](const OpContext& context, const FactorShard& shard) {
    return localize_output_shape(context, shard, "shape");
  };
  op.not_differentiable = true;  // no inputs
  op.cheap = true;
  op.reference_kernel = fill_kernel;
  OpExample example;
  example.name = "matrix";
  example.attributes = {
      {"value", 0.5}, {"shape", std::vector<int64_t>{6, 35}}, {"dtype", std::string("float32")}};
  OpExample integers = example;
  integers.name = "integers";
  integers.attributes.set("value", 7.0);
  integers.attributes.set("dtype", std::string("int64"));
  op.examples = {example, integers};
  return op;
}

void upgrade_constant_of_shape(UpgradeContext& context) {
  double value = 0;
  DType dtype = DType::kFloat32;
  if (context.attributes().has("value")) {
    const Tensor& tensor = context.attributes().get_tensor("value");
    value = tensor.to_double().at(0);
    dtype = tensor.dtype();
  }
  context.set_outputs(context.emit("Fill",
                                   {},
                                   {{"value", value},
                                    {"shape", context.int_input(0)},
                                    {"dtype", std::string(dtype_name(dtype))}}));
}

void upgrade_shape(UpgradeContext& context) {
  const Shape& shape = context.shape(context.input(0));
  const int64_t ndim = static_cast<int64_t>(shape.size());
  const auto bound = [ndim](int64_t axis) {
    return std::clamp<int64_t>(axis < 0 ? axis + ndim : axis, 0, ndim);
  };
  const int64_t start = bound(context.attributes().get_int("start", 0));
  const int64_t end = std::max(start, bound(context.attributes().get_int("end", ndim)));
  const std::vector<int64_t> dims(shape.begin() + start, shape.begin() + end);
  context.set_output(0,
                     context.constant(Tensor::from(dims, {static_cast<int64_t>(dims.size())}),
                                      context.node_name()));
}

void upgrade_size(UpgradeContext& context) {
  const int64_t size = num_elements(context.shape(context.input(0)));
  context.set_output(0, context.constant(Tensor::scalar<int64_t>(size), context.node_name()));
}

void upgrade_eye_like(UpgradeContext& context) {
  const TensorType& like = context.type(context.input(0));
  const DType dtype = context.attributes().has("dtype")
                          ? dtype_from_onnx(context.attributes().get_int("dtype"))
                          : like.dtype;
  if (like.shape.size() != 2) {
    context.fail(concat("input must have 2 dims, got ", shape_string(like.shape)));
  }
  constexpr int64_t kMostElements = int64_t{1} << 26;  // it is written out: an 8192 x 8192 matrix
  if (num_elements(like.shape) > kMostElements) {
    context.fail(concat("an identity matrix of ",
                        shape_string(like.shape),
                        " has more than ",
                        kMostElements,
                        " elements"));
  }
  const int64_t k = std::clamp<int64_t>(
      context.attributes().get_int("k", 0), -like.shape[0], like.shape[1]);  // beyond: all zeros
  Tensor eye(DType::kFloat64, like.shape);
  for (int64_t row = std::max<int64_t>(0, -k); row < like.shape[0] && row + k < like.shape[1];
       ++row) {
    eye.data<double>()[row * like.shape[1] + row + k] = 1;
  }
  context.set_output(0, context.constant(eye.cast(dtype), context.node_name()));
}

const RegisterOp kFill{fill_op()};
const RegisterUpgrade kConstantOfShape{"ConstantOfShape", upgrade_constant_of_shape};
const RegisterUpgrade kShape{"Shape", upgrade_shape};
const RegisterUpgrade kSize{"Size", upgrade_size};
const RegisterUpgrade kEyeLike{"EyeLike", upgrade_eye_like};

}  // namespace

}  // namespace trainrt
