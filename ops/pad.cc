// Pad in modes constant, reflect, edge and wrap; `pads` lists all dims, and a negative pad crops.
// The gradient of constant padding is constant padding by the negated amounts; of the other modes,
// a sum over the places where an element went (PadGrad).
//
// A row of the output (its innermost dim) comes from one row of the input, found by mapping the
// outer indices; within the row the part without padding is one copy.
#include "ops/pad.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/broadcast.h"
#include "ops/convert.h"
#include "ops/strided_copy.h"

namespace trainrt {

namespace {

constexpr int64_t kGrainBytes = 1 << 16;

// The padded tensor's rows and where they come from.
struct Rows {
  const Shape& inner;  // the tensor without padding
  const Shape& outer;  // with it
  const std::vector<int64_t>& pads;
  PadMode mode;

  int64_t length() const { return outer.empty() ? 1 : outer.back(); }
  int64_t count() const {
    return dims_product(outer, 0, std::max(0, static_cast<int>(outer.size()) - 1));
  }
  // Offset in elements of the row's source; -1: all constant.
  int64_t source_row(int64_t row) const {
    int64_t offset = 0, stride = inner.empty() ? 1 : inner.back();
    for (int d = static_cast<int>(outer.size()) - 2; d >= 0; --d) {
      const size_t dim = static_cast<size_t>(d);
      const int64_t from = pad_source(row % outer[dim], pads[dim], inner[dim], mode);
      row /= outer[dim];
      if (from < 0) {
        return -1;
      }
      offset += from * stride;
      stride *= inner[dim];
    }
    return offset;
  }
  int64_t source_column(int64_t i) const {
    return outer.empty() ? 0 : pad_source(i, pads[outer.size() - 1], inner.back(), mode);
  }
  // The part of a row that is copied as it is.
  std::pair<int64_t, int64_t> copied() const {
    if (outer.empty()) {
      return {0, 1};
    }
    const int64_t pad = pads[outer.size() - 1];
    const int64_t begin = std::clamp<int64_t>(pad, 0, outer.back());
    return {begin, std::clamp<int64_t>(pad + inner.back(), begin, outer.back())};
  }
};

template <typename Word>
void pad_words(KernelContext& context, const Rows& rows, Word value) {
  const Word* in = static_cast<const Word*>(context.raw_input(0));
  Word* out = static_cast<Word*>(context.raw_output(0));
  const int64_t length = rows.length();
  const auto copied = rows.copied();
  const int64_t copy_begin = copied.first, copy_end = copied.second;
  const int64_t row_bytes = std::max<int64_t>(1, length * static_cast<int64_t>(sizeof(Word)));
  context.parallel_for(
      rows.count(), std::max<int64_t>(1, kGrainBytes / row_bytes), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          Word* to = out + row * length;
          const int64_t source = rows.source_row(row);
          if (source < 0) {
            std::fill_n(to, length, value);
            continue;
          }
          const auto padded = [&](int64_t i) {
            const int64_t column = rows.source_column(i);
            to[i] = column < 0 ? value : in[source + column];
          };
          for (int64_t i = 0; i < copy_begin; ++i) {
            padded(i);
          }
          if (copy_end > copy_begin) {
            std::memcpy(to + copy_begin,
                        in + source + rows.source_column(copy_begin),
                        static_cast<size_t>(copy_end - copy_begin) * sizeof(Word));
          }
          for (int64_t i = copy_end; i < length; ++i) {
            padded(i);
          }
        }
      });
}

void pad_kernel(KernelContext& context) {
  const DType dtype = context.output_dtype(0);
  const Rows rows{context.input_shape(0),
                  context.output_shape(0),
                  context.attributes().get_ints("pads"),
                  pad_mode_of(context.attributes())};
  const double value = context.attributes().get_float("value", 0);
  uint64_t bits = 0;
  convert_elements(DType::kFloat64, &value, dtype, &bits, 1);
  switch (dtype_bytes(dtype)) {
    case 1:
      return pad_words(context, rows, static_cast<uint8_t>(bits));
    case 2:
      return pad_words(context, rows, static_cast<uint16_t>(bits));
    case 4:
      return pad_words(context, rows, static_cast<uint32_t>(bits));
    default:
      return pad_words(context, rows, bits);
  }
}

// Dims before the first padded one are independent: the work is cut over them.
template <typename T>
void pad_grad(KernelContext& context, const Rows& rows) {
  const T* dy = context.input<T>(0);
  T* dx = context.output<T>(0);
  const int ndim = static_cast<int>(rows.outer.size());
  int first = 0;
  while (first < ndim &&
         rows.outer[static_cast<size_t>(first)] == rows.inner[static_cast<size_t>(first)]) {
    ++first;
  }
  first = std::min(first, std::max(0, ndim - 1));
  const int64_t groups = dims_product(rows.outer, 0, first);
  const int64_t rows_per_group = groups == 0 ? 0 : rows.count() / groups;
  const int64_t size = dims_product(rows.inner, first, ndim);
  context.parallel_for(groups, 1, [&](int64_t begin, int64_t end) {
    std::fill_n(dx + begin * size, (end - begin) * size, T{});
    for (int64_t row = begin * rows_per_group; row < end * rows_per_group; ++row) {
      const int64_t source = rows.source_row(row);
      for (int64_t i = 0; source >= 0 && i < rows.length(); ++i) {
        const int64_t column = rows.source_column(i);
        if (column >= 0) {
          T& to = dx[source + column];
          to = T(static_cast<Accumulator<T>>(to) +
                 static_cast<Accumulator<T>>(dy[row * rows.length() + i]));
        }
      }
    }
  });
}

void pad_grad_kernel(KernelContext& context) {
  const Rows rows{context.output_shape(0),
                  context.input_shape(0),
                  context.attributes().get_ints("pads"),
                  pad_mode_of(context.attributes())};
  dispatch_floating(context.output_dtype(0),
                    [&](auto tag) { pad_grad<decltype(tag)>(context, rows); });
}

// `sign` 1: the padded shape of `shape`; -1: the shape that was padded to it.
Shape padded_shape(const Attributes& attributes, Shape shape, int64_t sign) {
  const std::vector<int64_t>& pads = attributes.get_ints("pads");
  const size_t ndim = shape.size();
  TRAINRT_REQUIRE(pads.size() == 2 * ndim,
                  kInvalidModel,
                  "Pad wants ",
                  2 * ndim,
                  " amounts for ",
                  shape_string(shape),
                  ", got ",
                  pads.size());
  for (size_t d = 0; d < ndim; ++d) {
    const int64_t from = shape[d];
    shape[d] += sign * (pads[d] + pads[ndim + d]);
    TRAINRT_REQUIRE(shape[d] >= 0, kInvalidModel, "Pad crops more than dim ", d, " has");
    const int64_t inner = sign > 0 ? from : shape[d];
    const int64_t kept =
        inner + std::min<int64_t>(pads[d], 0) + std::min<int64_t>(pads[ndim + d], 0);
    TRAINRT_REQUIRE(kept > 0 || (pads[d] <= 0 && pads[ndim + d] <= 0) ||
                        pad_mode_of(attributes) == PadMode::kConstant,
                    kInvalidModel,
                    "Pad by ",
                    pads[d],
                    " and ",
                    pads[ndim + d],
                    " leaves nothing of dim ",
                    d,
                    " of size ",
                    inner,
                    " that mode '",
                    attributes.get_string("mode", "constant"),
                    "' could repeat");
  }
  return shape;
}

ShardingRule sharding(const OpContext& op) {
  const Shape& shape = op.input_shape(0);
  const std::vector<int64_t>& pads = op.attributes().get_ints("pads");
  ShardingRule rule;
  TensorFactors factors(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) {
    if (pads[d] == 0 && pads[shape.size() + d] == 0) {
      factors[d] = {static_cast<int>(rule.factors.size())};
      rule.factors.push_back({concat("d", d), shape[d]});
    }
  }
  rule.inputs = {factors};
  rule.outputs = {factors};
  if (pad_mode_of(op.attributes()) != PadMode::kConstant ||
      op.attributes().get_float("value", 0) == 0) {
    rule.linear = {{0}};
  }
  return rule;
}

void pad_gradient(GradientBuilder& g) {
  if (pad_mode_of(g.attributes()) != PadMode::kConstant) {
    g.set_input_grad(0, g.op("PadGrad", {g.output_grad(0)}, g.attributes()));
    return;
  }
  std::vector<int64_t> pads = g.attributes().get_ints("pads");
  for (int64_t& pad : pads) {
    pad = -pad;
  }
  g.set_input_grad(0, g.op("Pad", {g.output_grad(0)}, {{"pads", pads}, {"value", 0.0}}));
}

// Amounts and value are attributes before opset 11, then inputs; from 18 on for some axes only.
void upgrade_pad(UpgradeContext& context) {
  const ValueId input = context.input(0);
  const size_t ndim = static_cast<size_t>(context.ndim(input));
  const bool as_inputs = context.opset() >= 11;
  std::vector<int64_t> pads =
      as_inputs ? context.int_input(1) : context.attributes().get_ints("pads");
  double value = context.attributes().get_float("value", 0);
  if (context.has_input(2)) {
    value = context.float_input(2);
  }
  if (context.has_input(3)) {
    const std::vector<int64_t> axes = context.int_input(3);
    if (pads.size() != 2 * axes.size()) {
      context.fail(concat("got ", pads.size(), " amounts for ", axes.size(), " axes"));
    }
    std::vector<int64_t> all(2 * ndim, 0);
    for (size_t i = 0; i < axes.size(); ++i) {
      const size_t d = static_cast<size_t>(normalize_axis(axes[i], static_cast<int>(ndim)));
      all[d] = pads[i];
      all[ndim + d] = pads[axes.size() + i];
    }
    pads = all;
  }
  context.set_outputs(context.emit("Pad",
                                   {input},
                                   {{"pads", pads},
                                    {"mode", context.attributes().get_string("mode", "constant")},
                                    {"value", value}}));
}

OpExample example(std::string name, std::string mode, Shape shape, std::vector<int64_t> pads) {
  OpExample pad;
  pad.name = std::move(name);
  pad.attributes = {{"pads", std::move(pads)}, {"mode", std::move(mode)}, {"value", 0.0}};
  pad.inputs = {{DType::kFloat32, std::move(shape)}};
  return pad;
}

OpDef pad_op() {
  OpDef op;
  op.name = "Pad";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    return {
        {context.input_dtype(0), padded_shape(context.attributes(), context.input_shape(0), 1)}};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = sharding;
  op.gradient = pad_gradient;
  op.upgrade = upgrade_pad;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.reference_kernel = pad_kernel;
  op.examples = {example("image", "constant", {2, 6, 5, 7}, {0, 0, 1, 2, 0, 0, 3, 1}),
                 example("crop one side", "constant", {6, 8}, {0, -2, 0, 3}),
                 example("reflect", "reflect", {2, 6, 5, 7}, {0, 0, 2, 3, 0, 0, 4, 1}),
                 example("edge", "edge", {6, 5}, {0, 2, 0, 3}),
                 example("wrap", "wrap", {4, 6}, {1, 2, 0, 7})};
  op.examples.push_back(op.examples[0]);
  op.examples.back().name = "with a value";
  op.examples.back().attributes.set("value", 1.5);
  return op;
}

OpDef pad_grad_op() {
  OpDef op;
  op.name = "PadGrad";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    return {
        {context.input_dtype(0), padded_shape(context.attributes(), context.input_shape(0), -1)}};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context); };
  op.sharding = sharding;
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(0, g.op("Pad", {g.output_grad(0)}, g.attributes()));
  };
  op.reference_kernel = pad_grad_kernel;
  op.examples = {example("reflect", "reflect", {2, 6, 11, 11}, {0, 0, 2, 3, 0, 0, 4, 1}),
                 example("edge", "edge", {6, 10}, {0, 2, 0, 3})};
  return op;
}

const RegisterOp kPad{pad_op()};
const RegisterOp kPadGrad{pad_grad_op()};

}  // namespace

}  // namespace trainrt
