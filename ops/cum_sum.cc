// CumSum along `axis`, Trilu (a triangle of the last two dims) and ReverseSequence. All are linear,
// and their gradients are themselves: the sum from the other end, the same triangle, the same
// reversal.
#include <algorithm>
#include <cstring>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/index_check.h"
#include "ops/int_scalar.h"

namespace trainrt {

namespace {

constexpr int64_t kGrain = 1 << 14;

// All dims are parallel but those in `whole`.
ShardingRule all_but(const OpContext& op, const std::vector<int>& whole) {
  const Shape& shape = op.input_shape(0);
  ShardingRule rule;
  TensorFactors factors(shape.size());
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    if (std::find(whole.begin(), whole.end(), d) == whole.end()) {
      factors[static_cast<size_t>(d)] = {static_cast<int>(rule.factors.size())};
      rule.factors.push_back({concat("d", d), shape[static_cast<size_t>(d)]});
    }
  }
  rule.inputs = {factors};
  rule.outputs = {factors};
  rule.linear = {{0}};
  return rule;
}

void cum_sum_kernel(KernelContext& context) {
  const Shape& shape = context.input_shape(0);
  const int axis =
      normalize_axis(context.attributes().get_int("axis"), static_cast<int>(shape.size()));
  const bool exclusive = context.attributes().get_int("exclusive", 0) != 0;
  const bool reverse = context.attributes().get_int("reverse", 0) != 0;
  const int64_t n = shape[static_cast<size_t>(axis)];
  const int64_t inner = dims_product(shape, axis + 1, static_cast<int>(shape.size()));
  const int64_t lines = dims_product(shape, 0, axis) * inner;
  dispatch_all(context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    using A = Accumulator<T>;
    if constexpr (std::is_same_v<T, bool>) {
      TRAINRT_FAIL(kUnsupported, "CumSum of bool");
    } else {
      const T* x = context.input<T>(0);
      T* y = context.output<T>(0);
      const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n));
      context.parallel_for(lines, grain, [&](int64_t begin, int64_t end) {
        for (int64_t line = begin; line < end; ++line) {
          const int64_t offset = line / inner * n * inner + line % inner;
          A sum{};
          for (int64_t i = 0; i < n; ++i) {
            const int64_t at = offset + (reverse ? n - 1 - i : i) * inner;
            const A before = sum;
            sum = static_cast<A>(sum + static_cast<A>(x[at]));
            y[at] = T(exclusive ? before : sum);
          }
        }
      });
    }
  });
}

OpDef cum_sum_op() {
  OpDef op;
  op.name = "CumSum";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    context.axis();  // refuses one that is outside
    return {context.input_type(0)};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context); };
  op.sharding = [](const OpContext& context) { return all_but(context, {context.axis()}); };
  op.gradient = [](GradientBuilder& g) {
    Attributes attributes = g.attributes();
    attributes.set("reverse", int64_t{attributes.get_int("reverse", 0) == 0 ? 1 : 0});
    g.set_input_grad(0, g.op("CumSum", {g.output_grad(0)}, attributes));
  };
  op.upgrade = [](UpgradeContext& context) {
    Attributes attributes = context.attributes();
    attributes.set("axis", int_scalar(context, 1));
    context.set_outputs(context.emit("CumSum", {context.input(0)}, attributes));
  };
  op.cheap = true;
  op.reference_kernel = cum_sum_kernel;
  OpExample last;
  last.name = "last axis";
  last.attributes = {{"axis", int64_t{1}}};
  last.inputs = {{DType::kFloat32, {6, 9}}};
  OpExample exclusive = last;
  exclusive.name = "exclusive, reversed, first axis";
  exclusive.attributes = {{"axis", int64_t{0}}, {"exclusive", int64_t{1}}, {"reverse", int64_t{1}}};
  op.examples = {last, exclusive};
  return op;
}

void trilu_kernel(KernelContext& context) {
  const Shape& shape = context.input_shape(0);
  const int ndim = static_cast<int>(shape.size());
  const int64_t rows = shape[static_cast<size_t>(ndim - 2)];
  const int64_t columns = shape[static_cast<size_t>(ndim - 1)];
  const bool upper = context.attributes().get_int("upper", 1) != 0;
  const int64_t k = context.attributes().get_int("k", 0);
  const int64_t bytes = dtype_bytes(context.output_dtype(0));
  const std::byte* in = static_cast<const std::byte*>(context.raw_input(0));
  std::byte* out = static_cast<std::byte*>(context.raw_output(0));
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, columns));
  context.parallel_for(dims_product(shape, 0, ndim - 1), grain, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      // Kept: columns [first, last).
      const int64_t diagonal = std::clamp<int64_t>(row % rows + k + (upper ? 0 : 1), 0, columns);
      const int64_t first = upper ? diagonal : 0, last = upper ? columns : diagonal;
      std::byte* to = out + row * columns * bytes;
      std::memset(to, 0, static_cast<size_t>(first * bytes));
      if (in != out) {
        std::memcpy(to + first * bytes,
                    in + (row * columns + first) * bytes,
                    static_cast<size_t>((last - first) * bytes));
      }
      std::memset(to + last * bytes, 0, static_cast<size_t>((columns - last) * bytes));
    }
  });
}

OpDef trilu_op() {
  OpDef op;
  op.name = "Trilu";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    TRAINRT_REQUIRE(context.input_shape(0).size() >= 2,
                    kInvalidModel,
                    "Trilu wants matrices, got ",
                    shape_string(context.input_shape(0)));
    return {context.input_type(0)};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = [](const OpContext& context) {
    const int ndim = static_cast<int>(context.input_shape(0).size());
    return all_but(context, {ndim - 2, ndim - 1});
  };
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(0, g.op("Trilu", {g.output_grad(0)}, g.attributes()));
  };
  op.upgrade = [](UpgradeContext& context) {
    int64_t k = context.has_input(1) ? int_scalar(context, 1) : int64_t{0};
    if (const Shape& shape = context.shape(context.input(0)); shape.size() >= 2) {
      // Beyond the matrix all is kept, or nothing.
      k = std::clamp(k, -shape[shape.size() - 2], shape.back());
    }
    context.set_outputs(
        context.emit("Trilu",
                     {context.input(0)},
                     {{"upper", context.attributes().get_int("upper", 1)}, {"k", k}}));
  };
  op.inplace = {{0, 0}};
  op.cheap = true;
  op.reference_kernel = trilu_kernel;
  OpExample lower;
  lower.name = "lower";
  lower.attributes = {{"upper", int64_t{0}}};
  lower.inputs = {{DType::kFloat32, {6, 5, 7}}};
  OpExample upper = lower;
  upper.name = "above the diagonal";
  upper.attributes = {{"upper", int64_t{1}}, {"k", int64_t{1}}};
  OpExample outside = lower;
  outside.name = "nothing kept";
  outside.attributes = {{"upper", int64_t{1}}, {"k", int64_t{9}}};
  op.examples = {lower, upper, outside};
  return op;
}

// The first lengths[b] steps of sample b come out in reverse order.
void reverse_sequence_kernel(KernelContext& context) {
  const Shape& shape = context.input_shape(0);
  const int64_t batch_axis = context.attributes().get_int("batch_axis");
  const int64_t steps = shape[static_cast<size_t>(1 - batch_axis)];
  const int64_t samples = shape[static_cast<size_t>(batch_axis)];
  const int64_t row_bytes =
      dims_product(shape, 2, static_cast<int>(shape.size())) * dtype_bytes(context.output_dtype(0));
  require_lengths<int64_t>(context, 1, steps);
  const int64_t* lengths = context.input<int64_t>(1);
  const std::byte* in = static_cast<const std::byte*>(context.raw_input(0));
  std::byte* out = static_cast<std::byte*>(context.raw_output(0));
  const auto offset = [=](int64_t sample, int64_t step) {
    return (batch_axis == 0 ? sample * steps + step : step * samples + sample) * row_bytes;
  };
  context.parallel_for(samples, 1, [=](int64_t begin, int64_t end) {
    for (int64_t sample = begin; sample < end; ++sample) {
      const int64_t length = lengths[sample];
      for (int64_t step = 0; step < steps; ++step) {
        const int64_t from = step < length ? length - 1 - step : step;
        std::memcpy(
            out + offset(sample, step), in + offset(sample, from), static_cast<size_t>(row_bytes));
      }
    }
  });
}

OpDef reverse_sequence_op() {
  OpDef op;
  op.name = "ReverseSequence";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    const Shape& shape = context.input_shape(0);
    const int64_t batch_axis = context.attributes().get_int("batch_axis");
    TRAINRT_REQUIRE(
        shape.size() >= 2 && (batch_axis == 0 || batch_axis == 1) &&
            context.input_dtype(1) == DType::kInt64 &&
            context.input_shape(1) == Shape{shape[static_cast<size_t>(batch_axis)]},
        kInvalidModel,
        "ReverseSequence of ",
        shape_string(shape),
        " with samples along axis ",
        batch_axis,
        " by ",
        dtype_name(context.input_dtype(1)),
        shape_string(context.input_shape(1)),
        "; wanted samples and steps along axes 0 and 1, and one int64 length per sample");
    return {context.input_type(0)};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = [](const OpContext& context) {
    const int batch_axis = static_cast<int>(context.attributes().get_int("batch_axis"));
    ShardingRule rule = all_but(context, {1 - batch_axis});
    rule.inputs.push_back({rule.inputs[0][static_cast<size_t>(batch_axis)]});
    return rule;
  };
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(0, g.op("ReverseSequence", {g.output_grad(0), g.input(1)}, g.attributes()));
  };
  op.upgrade = [](UpgradeContext& context) {
    const int64_t batch_axis = context.attributes().get_int("batch_axis", 1);
    const int64_t time_axis = context.attributes().get_int("time_axis", 0);
    TRAINRT_REQUIRE((batch_axis == 0 && time_axis == 1) || (batch_axis == 1 && time_axis == 0),
                    kInvalidModel,
                    "batch_axis is ",
                    batch_axis,
                    " and time_axis ",
                    time_axis,
                    "; wanted one to be 0, the other 1");
    context.set_outputs(
        context.emit("ReverseSequence", context.inputs(), {{"batch_axis", batch_axis}}));
  };
  op.cheap = true;
  op.reference_kernel = reverse_sequence_kernel;
  OpExample example;
  example.name = "batch first";
  example.attributes = {{"batch_axis", int64_t{0}}};
  example.inputs = {{DType::kFloat32, {4, 5, 6}}, {DType::kInt64, {4}}};
  example.values = {{}, Tensor::from<int64_t>({1, 5, 3, 0}, {4})};
  OpExample time_first = example;
  time_first.name = "time first";
  time_first.attributes = {{"batch_axis", int64_t{1}}};
  time_first.inputs[0].shape = {5, 4, 6};
  op.examples = {example, time_first};
  return op;
}

const RegisterOp kCumSum{cum_sum_op()};
const RegisterOp kTrilu{trilu_op()};
const RegisterOp kReverseSequence{reverse_sequence_op()};

}  // namespace

}  // namespace trainrt
