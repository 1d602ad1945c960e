// OneHot: on-value at the position that an index names, off-value elsewhere. Inputs (indices,
// values [off, on]); `depth` is an attribute. An index outside of [-depth, depth) gives off-values
// alone.
#include <algorithm>

#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/convert.h"
#include "ops/int_scalar.h"

namespace trainrt {

namespace {

constexpr int64_t kGrain = 1 << 14;

int axis_of(const OpContext& op) {
  return normalize_axis(op.attributes().get_int("axis", -1),
                        static_cast<int>(op.input_shape(0).size()) + 1);
}

template <typename T>
void one_hot(KernelContext& context) {
  const Shape& out_shape = context.output_shape(0);
  const int axis =
      normalize_axis(context.attributes().get_int("axis", -1), static_cast<int>(out_shape.size()));
  const int64_t depth = context.attributes().get_int("depth");
  const int64_t inner = dims_product(out_shape, axis + 1, static_cast<int>(out_shape.size()));
  const T off = context.input<T>(1)[0], on = context.input<T>(1)[1];
  const DType index_dtype = context.input_dtype(0);
  const std::byte* indices = static_cast<const std::byte*>(context.raw_input(0));
  T* out = context.output<T>(0);
  // One task per leading row: [depth, inner] of the output.
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, depth * inner));
  context.parallel_for(dims_product(out_shape, 0, axis), grain, [&](int64_t begin, int64_t end) {
    std::fill(out + begin * depth * inner, out + end * depth * inner, off);
    for (int64_t i = begin * inner; i < end * inner; ++i) {
      int64_t index = 0;
      convert_elements(
          index_dtype, indices + i * dtype_bytes(index_dtype), DType::kInt64, &index, 1);
      index += index < 0 ? depth : 0;
      if (index >= 0 && index < depth) {
        out[(i / inner * depth + index) * inner + i % inner] = on;
      }
    }
  });
}

OpDef one_hot_op() {
  OpDef op;
  op.name = "OneHot";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    TRAINRT_REQUIRE(context.input_shape(1) == Shape{2},
                    kInvalidModel,
                    "values of OneHot must be [off, on], got ",
                    shape_string(context.input_shape(1)));
    Shape shape = context.input_shape(0);
    shape.insert(shape.begin() + axis_of(context), context.attributes().get_int("depth"));
    return {{context.input_dtype(1), shape}};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = [](const OpContext& context) {
    const Shape& shape = context.input_shape(0);
    ShardingRule rule;
    TensorFactors factors;
    for (size_t d = 0; d < shape.size(); ++d) {
      factors.push_back({static_cast<int>(d)});
      rule.factors.push_back({concat("d", d), shape[d]});
    }
    rule.inputs = {factors, TensorFactors(1)};
    factors.insert(factors.begin() + axis_of(context), DimFactors{});
    rule.outputs = {factors};
    return rule;
  };
  op.not_differentiable = true;
  op.upgrade = [](UpgradeContext& context) {
    context.set_outputs(context.emit(
        "OneHot",
        {context.input(0), context.input(2)},
        {{"depth", int_scalar(context, 1)}, {"axis", context.attributes().get_int("axis", -1)}}));
  };
  op.cheap = true;
  op.reference_kernel = [](KernelContext& context) {
    dispatch_all(context.output_dtype(0), [&](auto tag) { one_hot<decltype(tag)>(context); });
  };
  OpExample example;
  example.name = "classes";
  example.attributes = {{"depth", int64_t{5}}};
  example.inputs = {{DType::kInt64, {6}}, {DType::kFloat32, {2}}};
  example.values = {Tensor::from<int64_t>({0, 4, -1, 2, 7, 3}, {6}),
                    Tensor::from<float>({0, 1}, {2})};
  OpExample first = example;
  first.name = "first axis";
  first.attributes.set("axis", int64_t{0});
  op.examples = {example, first};
  return op;
}

const RegisterOp kOneHot{one_hot_op()};

}  // namespace

}  // namespace trainrt
