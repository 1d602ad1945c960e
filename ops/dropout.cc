// Dropout: y = x / (1 - ratio) where a uniform draw is at least `ratio`, else 0. Output 1, with
// attribute `with_mask` = 1, is ONNX's mask (true: kept).
//
// Nothing is saved for the gradient: it is the same Dropout of dy, which draws the same numbers
// again (ops/random_draw.h). That costs a second round of Philox and saves a byte per element of
// every activation.
//
// ONNX: ratio is an attribute before opset 12, an input after; `is_test` before opset 7; from opset
// 12 on training_mode decides. Inference, and ratio 0, are the identity.
#include "graph/autodiff.h"
#include "graph/upgrade.h"
#include "ops/random_draw.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

// A 32-bit draw is kept if it is at least this: P(dropped) = ratio to 2^-32. With ratio 1 the one
// draw that is kept nevertheless is scaled by 0.
uint32_t threshold_of(double ratio) {
  return static_cast<uint32_t>(std::min(ratio * 0x1p32, 4294967295.0));
}

double ratio_of(const Attributes& attributes) {
  const double ratio = attributes.get_float("ratio", 0.5);
  TRAINRT_REQUIRE(ratio >= 0 && ratio <= 1,
                  kInvalidModel,
                  "Dropout: ratio is ",
                  ratio,
                  ", wanted a number from 0 to 1");
  return ratio;
}

template <typename T>
void kernel(KernelContext& op) {
  using C = Compute<T>;
  const double ratio = ratio_of(op.attributes());
  const uint32_t limit = threshold_of(ratio);
  const C scale = ratio < 1 ? static_cast<C>(1 / (1 - ratio)) : C(0);
  const T* x = op.input<T>(0);
  T* y = op.output<T>(0);
  bool* mask = op.output<bool>(1);
  draw_words(op, op.input_shape(0), [&](int64_t begin, const uint32_t* words, int64_t n) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const C value = load<C>(x[begin + i]) * scale;
      y[begin + i] = store<T>(words[i] >= limit ? value : C(0));
    }
    for (int64_t i = 0; mask != nullptr && i < n; ++i) {
      mask[begin + i] = words[i] >= limit;
    }
  });
}

void upgrade(UpgradeContext& u) {
  const ValueId x = u.input(0);
  const bool by_input = u.opset() >= 12;
  bool active = u.opset() >= 7 || u.attributes().get_int("is_test", 0) == 0;
  double ratio = by_input ? 0.5 : u.attributes().get_float("ratio", 0.5);
  if (by_input) {
    ratio = u.has_input(1) ? u.float_input(1) : ratio;
    active = u.has_input(2) && u.float_input(2) != 0;
  }
  if (!active || ratio == 0) {
    u.set_output(0, x);
    if (u.wants_output(1)) {
      u.set_output(1, u.fill(1, {DType::kBool, u.shape(x)}));
    }
    return;
  }
  Attributes attributes = {{"ratio", ratio}};
  set_random_stream(attributes, u.node_name(), u.attributes().get_float("seed", 0));
  if (u.wants_output(1)) {
    attributes.set("with_mask", int64_t{1});
  }
  u.set_outputs(u.emit("Dropout", {x}, attributes));
}

OpDef dropout_op() {
  OpDef op;
  op.name = "Dropout";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    ratio_of(context.attributes());
    TensorTypes types = infer_same(context);
    if (context.attributes().get_int("with_mask", 0) != 0) {
      types.push_back({DType::kBool, context.input_shape(0)});
    }
    return types;
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 16); };
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{0}});
  };
  op.localize = localize_random;
  op.reference_kernel = [](KernelContext& context) {
    dispatch_real(context.input_dtype(0), [&](auto tag) { kernel<decltype(tag)>(context); });
  };
  op.gradient = [](GradientBuilder& g) {
    Attributes attributes = g.attributes();
    attributes.erase("with_mask");
    g.set_input_grad(0, g.op("Dropout", {g.output_grad(0)}, attributes));
  };
  op.upgrade = upgrade;
  op.inplace = {{0, 0}};
  op.random = true;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  for (const int64_t batch_axis : {0, 1, -1}) {
    op.examples.push_back({.name = concat("batch_axis_", batch_axis),
                           .attributes = {{"ratio", 0.3},
                                          {"rng_stream", int64_t{77}},
                                          {"batch_axis", batch_axis},
                                          {"rows_per_sample", int64_t{1}}},
                           .inputs = {{DType::kFloat32, {4, 6, 10}}},
                           .values = {}});
  }
  op.examples.push_back(op.examples[0]);
  op.examples.back().name = "rows_per_sample";
  op.examples.back().attributes.set("rows_per_sample", int64_t{2});
  return op;
}

const RegisterOp kDropout{dropout_op()};

}  // namespace

}  // namespace trainrt
