// Softmax cross-entropy from logits, in pieces that can be sharded along the classes.
//
// With m = max_v s_v and z = sum_v exp(s_v - m), the loss of an item with label y is
// w_y (m + log z - s_y), and its gradient w_y (exp(s_v - m) / z - [v = y]). m and z have the size
// of the labels; they are all that the backward pass keeps: it recomputes the probabilities from
// the logits, so no second [items, classes] tensor lives between forward and backward.
//
// m is a plain ReduceMax and z the operator SumExp: a maximum and a sum over classes, so either is
// one small all-reduce when the classes are sharded. The loss operator then takes the terms m + log
// z on the shard that holds class 0, and - s_y on the shard that holds y (Megatron-LM's
// vocabulary-parallel cross-entropy, arXiv 1909.08053 section 3, without gathering logits).
#include <cmath>

#include "graph/autodiff.h"
#include "graph/upgrade.h"
#include "ops/class_axis.h"
#include "ops/cross_entropy.h"
#include "ops/item_blocks.h"
#include "ops/rows.h"
#include "ops/vector_math.h"

namespace trainrt {

namespace {

// ---- SumExp(scores, row_max): sum over `axis` of exp(scores - row_max).

template <typename T>
double sum_exp_row(const T* row, int64_t n, T max) {
  // Blocks in the narrow type, so that the loop is vector code; block sums in double.
  double sum = 0;
  constexpr int64_t kBlock = 256;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    T lanes[16] = {};
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
      for (int j = 0; j < 16; ++j) {
        lanes[j] += vmath::exp(row[i + j] - max);
      }
    }
    for (; i < end; ++i) {
      lanes[i % 16] += vmath::exp(row[i] - max);
    }
    for (const T lane : lanes) {
      sum += static_cast<double>(lane);
    }
  }
  return sum;
}

// Rows per block of work: about 16 K elements, depends on the shape alone.
int64_t row_grain(const ClassLayout& layout) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, layout.classes));
}

template <bool kReference>
void sum_exp_kernel(KernelContext& k) {
  const ClassLayout layout = class_layout(k.input_shape(0), k.attributes());
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T* scores = k.input<T>(0);
    const T* maxima = k.input<T>(1);
    T* sums = k.output<T>(0);
    k.parallel_for(layout.items(), row_grain(layout), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* row = scores + layout.base(i);
        double sum = 0;
        if (!kReference && layout.inner == 1) {
          sum = sum_exp_row(row, layout.classes, maxima[i]);
        } else {
          for (int64_t v = 0; v < layout.classes; ++v) {
            sum += std::exp(static_cast<double>(row[v * layout.inner]) -
                            static_cast<double>(maxima[i]));
          }
        }
        sums[i] = static_cast<T>(sum);
      }
    });
  });
}

const RegisterOp kSumExp{{
    .name = "SumExp",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      const Shape items = item_shape(op.input_shape(0), op.attributes());
      TRAINRT_REQUIRE(op.input_shape(1) == items,
                      kInvalidModel,
                      "SumExp: row_max is ",
                      shape_string(op.input_shape(1)),
                      ", wanted ",
                      shape_string(items));
      return {{statistic_dtype(op.input_dtype(0)), items}};
    },
    .cost = [](const OpContext& op) -> Cost {
      Cost cost = memory_bound_cost(op);
      cost.flops = 8.0 * static_cast<double>(op.num_elements(0));
      return cost;
    },
    .sharding = [](const OpContext& op) -> ShardingRule {
      const ClassEquation e = class_equation(op);
      return Factors(op, e.scores + "," + e.items + "->" + e.items).reduction("v");
    },
    .reference_kernel = sum_exp_kernel<true>,
    .not_differentiable = true,  // SoftmaxCrossEntropyLoss has the whole gradient
    .cpu_kernel = sum_exp_kernel<false>,
    .examples = {{.name = "last",
                  .attributes = {{"axis", int64_t{-1}}},
                  .inputs = {{DType::kFloat32, {4, 37}}, {DType::kFloat32, {4}}}},
                 {.name = "middle",
                  .attributes = {{"axis", int64_t{1}}},
                  .inputs = {{DType::kFloat32, {2, 6, 4}}, {DType::kFloat32, {2, 4}}}}},
}};

// ---- SoftmaxCrossEntropyLoss(scores, labels, row_max, sum_exp[, weights])

TensorTypes loss_types(const OpContext& op) {
  const Shape items = item_shape(op.input_shape(0), op.attributes());
  for (int i = 1; i < 4; ++i) {
    TRAINRT_REQUIRE(op.input_shape(i) == items,
                    kInvalidModel,
                    "cross-entropy: scores are ",
                    shape_string(op.input_shape(0)),
                    ", so labels, row_max and sum_exp must be ",
                    shape_string(items),
                    "; input ",
                    i,
                    " is ",
                    shape_string(op.input_shape(i)));
  }
  if (op.attributes().get_string("reduction", "sum") == "none") {
    return {{op.input_dtype(0), items}};
  }
  return {{DType::kFloat64, {}}};
}

// Weight of a label; one outside the classes (ItemCount refuses it) weighs nothing.
template <typename T>
double label_weight(const KernelContext& k, const T* weights, int input, int64_t label) {
  if (weights == nullptr) {
    return 1;
  }
  return label >= 0 && label < k.input_shape(input)[0] ? static_cast<double>(weights[label]) : 0;
}

// The loss of items [begin, end), to `items` if that is not null; returns their sum.
template <typename T, typename Label>
double loss_of_items(
    const KernelContext& k, const ClassLayout& layout, int64_t begin, int64_t end, T* items) {
  const IgnoreIndex ignore(k.attributes());
  const T* scores = k.input<T>(0);
  const Label* labels = k.input<Label>(1);
  const T* maxima = k.input<T>(2);
  const T* sums = k.input<T>(3);
  const T* weights = k.input<T>(4);
  double total = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t label = static_cast<int64_t>(labels[i]);
    double loss = 0;
    if (!ignore.matches(label)) {
      const int64_t local = label - layout.offset;
      if (layout.offset == 0) {
        loss += static_cast<double>(maxima[i]) + std::log(static_cast<double>(sums[i]));
      }
      if (local >= 0 && local < layout.classes) {
        loss -= static_cast<double>(scores[layout.base(i) + local * layout.inner]);
      }
      loss *= label_weight(k, weights, 4, label);
    }
    total += loss;
    if (items != nullptr) {
      items[i] = static_cast<T>(loss);
    }
  }
  return total;
}

void cross_entropy_kernel(KernelContext& k) {
  const ClassLayout layout = class_layout(k.input_shape(0), k.attributes());
  const bool none = k.attributes().get_string("reduction", "sum") == "none";
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    dispatch_labels(k.input_dtype(1), [&](auto label_tag) {
      using T = decltype(tag);
      using Label = decltype(label_tag);
      require_labels<Label>(k, 1);
      T* items = none ? k.output<T>(0) : nullptr;
      // The reference kernel has no workspace, and one block.
      const std::span<std::byte> workspace = k.workspace();
      if (workspace.empty()) {
        const double sum = loss_of_items<T, Label>(k, layout, 0, layout.items(), items);
        if (!none) {
          *k.output<double>(0) = sum;
        }
        return;
      }
      double* blocks = reinterpret_cast<double*>(workspace.data());
      k.parallel_for(layout.items(), kItemGrain, [&](int64_t begin, int64_t end) {
        blocks[begin / kItemGrain] = loss_of_items<T, Label>(k, layout, begin, end, items);
      });
      if (!none) {
        *k.output<double>(0) = sum_blocks(blocks, layout.items());
      }
    });
  });
}

void cross_entropy_gradient(GradientBuilder& g) {
  if (!g.needs_grad(0)) {
    return;
  }
  Attributes attributes = g.attributes();
  attributes.erase("reduction");
  std::vector<ValueId> inputs = {g.input(0), g.input(1), g.input(2), g.input(3), g.output_grad(0)};
  if (g.input(4) != kNoValue) {
    inputs.push_back(g.input(4));
  }
  g.set_input_grad(0, g.op("SoftmaxCrossEntropyGrad", inputs, attributes));
}

ShardingRule cross_entropy_sharding(const OpContext& op) {
  const ClassEquation e = class_equation(op);
  const bool none = op.attributes().get_string("reduction", "sum") == "none";
  Factors factors(op,
                  e.scores + "," + e.items + "," + e.items + "," + e.items +
                      (op.num_inputs() > 4 ? ",w" : "") + "->" + (none ? e.items : ""));
  if (op.has_input(4)) {
    factors.whole("w");
  }
  factors.reduction("v");
  return none ? factors : reduce_items(factors, op);
}

const RegisterOp kSoftmaxCrossEntropyLoss{{
    .name = "SoftmaxCrossEntropyLoss",
    .infer_types = loss_types,
    .cost = [](const OpContext& op) -> Cost {
      // One score per item is read, not all of them.
      Cost cost;
      cost.flops = 20.0 * static_cast<double>(op.num_elements(1));
      cost.bytes = static_cast<double>(op.input_bytes() - op.input_type(0).bytes() +
                                       op.input_type(2).bytes());
      return cost;
    },
    .sharding = cross_entropy_sharding,
    .reference_kernel = cross_entropy_kernel,
    .gradient = cross_entropy_gradient,
    .upgrade = upgrade_softmax_cross_entropy,
    .localize = localize_classes,
    .workspace = [](const OpContext& op, const DeviceSpec&) { return item_workspace(op, 1); },
    .examples = {{.name = "sum",
                  .attributes = {{"axis", int64_t{-1}}, {"ignore_index", int64_t{-100}}},
                  .inputs = {{DType::kFloat32, {4, 6}},
                             {DType::kInt64, {4}},
                             {DType::kFloat32, {4}},
                             {DType::kFloat32, {4}}},
                  .values = {Tensor{},
                             Tensor::from<int64_t>({5, 0, -100, 2}, {4}),
                             Tensor::from<float>({1, 1, 1, 1}, {4}),
                             Tensor::from<float>({2, 3, 2.5f, 2}, {4})},
                  // The statistics belong to the scores: tests/ops/loss_test checks the gradient.
                  .check_gradient = {-1}}},
}};

// ---- SoftmaxCrossEntropyGrad(scores, labels, row_max, sum_exp, upstream[, weights])
// upstream is the gradient of the sum (float64 scalar) or of each item (like row_max).

template <typename T, typename Label, bool kReference>
void gradient_of_items(const KernelContext& k,
                       const ClassLayout& layout,
                       int64_t begin,
                       int64_t end) {
  const IgnoreIndex ignore(k.attributes());
  const Label* labels = k.input<Label>(1);
  const T* weights = k.input<T>(5);
  const bool per_item = k.input_dtype(4) != DType::kFloat64 || !k.input_shape(4).empty();
  for (int64_t i = begin; i < end; ++i) {
    const int64_t label = static_cast<int64_t>(labels[i]);
    const T* row = k.input<T>(0) + layout.base(i);
    T* grad = k.output<T>(0) + layout.base(i);
    if (ignore.matches(label)) {
      for (int64_t v = 0; v < layout.classes; ++v) {
        grad[v * layout.inner] = T(0);
      }
      continue;
    }
    const double upstream =
        (per_item ? static_cast<double>(k.input<T>(4)[i]) : k.input<double>(4)[0]) *
        label_weight(k, weights, 5, label);
    const T max = k.input<T>(2)[i];
    const T factor = static_cast<T>(upstream / static_cast<double>(k.input<T>(3)[i]));
    if (!kReference && layout.inner == 1) {
      for (int64_t v = 0; v < layout.classes; ++v) {
        grad[v] = vmath::exp(row[v] - max) * factor;
      }
    } else {
      for (int64_t v = 0; v < layout.classes; ++v) {
        grad[v * layout.inner] = static_cast<T>(std::exp(row[v * layout.inner] - max)) * factor;
      }
    }
    const int64_t local = label - layout.offset;
    if (local >= 0 && local < layout.classes) {
      grad[local * layout.inner] -= static_cast<T>(upstream);
    }
  }
}

template <bool kReference>
void cross_entropy_grad_kernel(KernelContext& k) {
  const ClassLayout layout = class_layout(k.input_shape(0), k.attributes());
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    dispatch_labels(k.input_dtype(1), [&](auto label_tag) {
      k.parallel_for(layout.items(), row_grain(layout), [&](int64_t begin, int64_t end) {
        gradient_of_items<decltype(tag), decltype(label_tag), kReference>(k, layout, begin, end);
      });
    });
  });
}

const RegisterOp kSoftmaxCrossEntropyGrad{{
    .name = "SoftmaxCrossEntropyGrad",
    .infer_types = [](const OpContext& op) -> TensorTypes { return {op.input_type(0)}; },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op, 10); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      const ClassEquation e = class_equation(op);
      Factors factors(op,
                      e.scores + "," + e.items + "," + e.items + "," + e.items + "," +
                          (op.input_shape(4).empty() ? "" : e.items) +
                          (op.num_inputs() > 5 ? ",w" : "") + "->" + e.scores);
      if (op.has_input(5)) {
        factors.whole("w");
      }
      return factors;
    },
    .reference_kernel = cross_entropy_grad_kernel<true>,
    .not_differentiable = true,
    .localize = localize_classes,
    .inplace = {{0, 0}},
    .cpu_kernel = cross_entropy_grad_kernel<false>,
    .examples = {{.name = "last",
                  .attributes = {{"axis", int64_t{-1}}, {"ignore_index", int64_t{-100}}},
                  .inputs = {{DType::kFloat32, {4, 6}},
                             {DType::kInt64, {4}},
                             {DType::kFloat32, {4}},
                             {DType::kFloat32, {4}},
                             {DType::kFloat64, {}}},
                  .values = {Tensor{},
                             Tensor::from<int64_t>({5, 0, -100, 2}, {4}),
                             Tensor::from<float>({1, 1, 1, 1}, {4}),
                             Tensor::from<float>({2, 3, 2.5f, 2}, {4}),
                             Tensor::scalar<double>(0.25)}}},
}};

}  // namespace

}  // namespace trainrt
