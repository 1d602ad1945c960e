// GatherElements: y[i][j] = data[index[i][j]][j] (along `axis`); ScatterElements writes (reduction
// none) or combines (add, mul, max, min) updates there. Each is the other's gradient.
//
// Lines along the axis are independent and an update touches only its own line, so work is cut over
// lines and the updates of one line are applied in order: the bits do not depend on threads.
// Neither shards along the axis. Negative indices count from the end.
#include <algorithm>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/device_sort.h"
#include "ops/gather.h"
#include "ops/index_check.h"
#include "ops/scatter_gradient.h"
#include "ops/strided_copy.h"

namespace trainrt {

namespace {

constexpr int64_t kGrain = 1 << 12;

// Walks the lines of `indices` along the axis, with the offset of the matching line of `data`.
class LineWalk {
 public:
  LineWalk(const Shape& data, const Shape& indices, int axis)
      : data_strides_(row_major_strides(data)),
        index_strides_(row_major_strides(indices)),
        indices_(indices),
        axis_(static_cast<size_t>(axis)) {}

  int64_t num_lines() const {
    return num_elements(indices_) / std::max<int64_t>(1, indices_[axis_]);
  }
  int64_t length() const { return indices_[axis_]; }
  int64_t data_stride() const { return data_strides_[axis_]; }
  int64_t index_stride() const { return index_strides_[axis_]; }
  // Offsets of line `line` in indices and in data.
  std::pair<int64_t, int64_t> offsets(int64_t line) const {
    int64_t index_offset = 0, data_offset = 0;
    for (size_t d = indices_.size(); d-- > 0;) {
      if (d != axis_) {
        const int64_t i = line % indices_[d];
        line /= indices_[d];
        index_offset += i * index_strides_[d];
        data_offset += i * data_strides_[d];
      }
    }
    return {index_offset, data_offset};
  }

 private:
  Shape data_strides_, index_strides_, indices_;
  size_t axis_;
};

int64_t raw_index(const void* data, bool wide, int64_t i) {
  return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

// The index as a position in [0, size).
int64_t read_index(const void* data, bool wide, int64_t i, int64_t size) {
  const int64_t index = raw_index(data, wide, i);
  return index < 0 ? index + size : index;
}

void require_in_range(const KernelContext& context, int input, int64_t size) {
  const bool wide = context.input_dtype(input) == DType::kInt64;
  for (int64_t i = 0; i < num_elements(context.input_shape(input)); ++i) {
    require_index(context, raw_index(context.raw_input(input), wide, i), i, size);
  }
}

int axis_of(const KernelContext& context) {
  return normalize_axis(context.attributes().get_int("axis", 0),
                        static_cast<int>(context.input_shape(0).size()));
}

template <typename Word>
void gather_words(KernelContext& context, const LineWalk& walk, int64_t size) {
  const Word* data = static_cast<const Word*>(context.raw_input(0));
  Word* out = static_cast<Word*>(context.raw_output(0));
  const void* indices = context.raw_input(1);
  const bool wide = context.input_dtype(1) == DType::kInt64;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, walk.length()));
  context.parallel_for(walk.num_lines(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t line = begin; line < end; ++line) {
      const auto [index_offset, data_offset] = walk.offsets(line);
      for (int64_t i = 0; i < walk.length(); ++i) {
        const int64_t at = index_offset + i * walk.index_stride();
        out[at] = data[data_offset + read_index(indices, wide, at, size) * walk.data_stride()];
      }
    }
  });
}

void gather_elements_kernel(KernelContext& context) {
  const int axis = axis_of(context);
  const int64_t size = context.input_shape(0)[static_cast<size_t>(axis)];
  require_in_range(context, 1, size);
  const LineWalk walk(context.input_shape(0), context.input_shape(1), axis);
  switch (dtype_bytes(context.output_dtype(0))) {
    case 1:
      return gather_words<uint8_t>(context, walk, size);
    case 2:
      return gather_words<uint16_t>(context, walk, size);
    case 4:
      return gather_words<uint32_t>(context, walk, size);
    default:
      return gather_words<uint64_t>(context, walk, size);
  }
}

enum class Combine : uint8_t { kNone, kAdd, kMul, kMax, kMin };

Combine combine_of(const Attributes& attributes) {
  const std::string name = attributes.get_string("reduction", "none");
  if (name == "none") {
    return Combine::kNone;
  }
  if (name == "add") {
    return Combine::kAdd;
  }
  if (name == "mul") {
    return Combine::kMul;
  }
  TRAINRT_REQUIRE(name == "max" || name == "min", kInvalidModel, "unknown reduction '", name, "'");
  return name == "max" ? Combine::kMax : Combine::kMin;
}

template <typename T>
T combine(T a, T b, Combine how) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return how == Combine::kNone ? b
                                 : T(combine(static_cast<float>(a), static_cast<float>(b), how));
  } else {
    switch (how) {
      case Combine::kAdd:
        return static_cast<T>(a + b);
      case Combine::kMul:
        return static_cast<T>(a * b);
      case Combine::kMax:
        return b > a ? b : a;
      case Combine::kMin:
        return b < a ? b : a;
      default:
        return b;
    }
  }
}

void scatter_elements_kernel(KernelContext& context) {
  copy_kernel(context);
  const int axis = axis_of(context);
  const int64_t size = context.input_shape(0)[static_cast<size_t>(axis)];
  require_in_range(context, 1, size);
  const LineWalk walk(context.input_shape(0), context.input_shape(1), axis);
  const Combine how = combine_of(context.attributes());
  const void* indices = context.raw_input(1);
  const bool wide = context.input_dtype(1) == DType::kInt64;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, walk.length()));
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T* updates = context.input<T>(2);
    T* out = context.output<T>(0);
    context.parallel_for(walk.num_lines(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t line = begin; line < end; ++line) {
        const auto [index_offset, data_offset] = walk.offsets(line);
        for (int64_t i = 0; i < walk.length(); ++i) {
          const int64_t at = index_offset + i * walk.index_stride();
          T& to = out[data_offset + read_index(indices, wide, at, size) * walk.data_stride()];
          to = combine(to, updates[at], how);
        }
      }
    });
  });
}

// Each line of the indices has its line in the data.
void require_indices(const OpContext& op) {
  require_index_dtype(op, 1);
  const Shape& data = op.input_shape(0);
  const Shape& indices = op.input_shape(1);
  TRAINRT_REQUIRE(indices.size() == data.size(),
                  kInvalidModel,
                  "indices ",
                  shape_string(indices),
                  " and data ",
                  shape_string(data),
                  " differ in their number of dims");
  const size_t axis = static_cast<size_t>(op.axis(0));
  for (size_t d = 0; d < data.size(); ++d) {
    TRAINRT_REQUIRE(d == axis || indices[d] <= data[d],
                    kInvalidModel,
                    "indices ",
                    shape_string(indices),
                    " are larger than data ",
                    shape_string(data),
                    " in dim ",
                    d,
                    "; only along axis ",
                    axis,
                    " may they be");
  }
}

// Dims along which data and indices have one size are factors, the axis is not.
ShardingRule sharding(const OpContext& op) {
  const Shape& data = op.input_shape(0);
  const Shape& indices = op.input_shape(1);
  const int axis = op.axis(0);
  ShardingRule rule;
  TensorFactors factors(data.size());
  for (size_t d = 0; d < data.size(); ++d) {
    if (static_cast<int>(d) != axis && data[d] == indices[d]) {
      factors[d] = {static_cast<int>(rule.factors.size())};
      rule.factors.push_back({concat("d", d), data[d]});
    }
  }
  rule.inputs.assign(static_cast<size_t>(op.num_inputs()), factors);
  rule.outputs = {factors};
  return rule;
}

std::vector<OpExample> gather_examples() {
  return {
      gather_example("columns",
                     {6, 4},
                     Tensor::from<int64_t>({0, 3, 1, 1, 2, -1, 0, 0, -4, 2, 3, 3}, {6, 2}),
                     1),
      gather_example("rows", {3, 4}, Tensor::from<int32_t>({0, 2, 1, 1, 2, 2, 0, -3}, {2, 4}), 0)};
}

OpDef gather_elements_op() {
  OpDef op;
  op.name = "GatherElements";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    require_indices(context);
    return {{context.input_dtype(0), context.input_shape(1)}};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = [](const OpContext& context) {
    ShardingRule rule = sharding(context);
    rule.linear = {{0}};
    return rule;
  };
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(
        0,
        g.op("ScatterElements",
             {g.zeros_like(g.input(0)), g.input(1), g.output_grad(0)},
             {{"axis", g.attributes().get_int("axis", 0)}, {"reduction", std::string("add")}}));
  };
  op.upgrade = [](UpgradeContext& context) { context.pass_through(); };
  op.cheap = true;
  op.reference_kernel = gather_elements_kernel;
  op.examples = gather_examples();
  return op;
}

void gradient_of_scatter(GradientBuilder& g) {
  const ValueId indices = g.input(1);
  const int64_t axis = g.attributes().get_int("axis", 0);
  scatter_gradient(g,
                   {.gather =
                        [&](ValueId from) {
                          return g.op("GatherElements", {from, indices}, {{"axis", axis}});
                        },
                    .scatter =
                        [&](ValueId data, ValueId updates, const std::string& reduction) {
                          return g.op("ScatterElements",
                                      {data, indices, updates},
                                      {{"axis", axis}, {"reduction", reduction}});
                        }});
}

void upgrade_scatter(UpgradeContext& context) {
  context.set_outputs(
      context.emit("ScatterElements",
                   context.inputs(),
                   {{"axis", context.attributes().get_int("axis", 0)},
                    {"reduction", context.attributes().get_string("reduction", "none")}}));
}

OpDef scatter_elements_op() {
  OpDef op;
  op.name = "ScatterElements";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    TRAINRT_REQUIRE(context.num_inputs() == 3,
                    kInvalidModel,
                    "ScatterElements takes data, indices and updates");
    require_indices(context);
    TRAINRT_REQUIRE(context.input_shape(1) == context.input_shape(2) &&
                        context.input_dtype(2) == context.input_dtype(0),
                    kInvalidModel,
                    "updates ",
                    dtype_name(context.input_dtype(2)),
                    shape_string(context.input_shape(2)),
                    " do not fit indices ",
                    shape_string(context.input_shape(1)),
                    " and data of ",
                    dtype_name(context.input_dtype(0)));
    return {context.input_type(0)};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = [](const OpContext& context) {
    ShardingRule rule = sharding(context);
    const Combine how = combine_of(context.attributes());
    if (how == Combine::kNone || how == Combine::kAdd) {
      rule.linear = {{0, 2}};
    }
    return rule;
  };
  op.gradient = gradient_of_scatter;
  op.upgrade = upgrade_scatter;
  op.inplace = {{0, 0}};
  op.cheap = true;
  op.workspace = [](const OpContext& context, const DeviceSpec& spec) {
    return spec.backend == Backend::kCuda ? device_sort::bytes(context.num_elements(1)) : 0;
  };
  op.reference_kernel = scatter_elements_kernel;
  // Without a reduction ONNX leaves equal indices undefined: these are distinct.
  OpExample write = gather_example(
      "write", {6, 4}, Tensor::from<int64_t>({0, 3, 1, 0, 2, -1, 0, 1, -4, 2, 3, 1}, {6, 2}), 1);
  write.inputs.push_back({DType::kFloat32, {6, 2}});
  op.examples = {write};
  for (const std::string reduction : {"add", "mul", "max", "min"}) {
    for (OpExample combined : gather_examples()) {
      combined.name = reduction + " to " + combined.name;
      combined.attributes.set("reduction", reduction);
      combined.inputs.push_back({DType::kFloat32, combined.inputs[1].shape});
      op.examples.push_back(combined);
    }
  }
  return op;
}

const RegisterOp kGatherElements{gather_elements_op()};
const RegisterOp kScatterElements{scatter_elements_op()};
const RegisterUpgrade kScatter{"Scatter", upgrade_scatter};

}  // namespace

}  // namespace trainrt
