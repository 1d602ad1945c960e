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
//
// 16-bit scores are read as they lie. m is one of them and has their type; z, weights and losses of
// items are float32 beside them.
#include <cmath>

#include "graph/autodiff.h"
#include "graph/upgrade.h"
#include "ops/class_axis.h"
#include "ops/convert.h"
#include "ops/cross_entropy.h"
#include "ops/item_blocks.h"
#include "ops/rows.h"
#include "ops/vector_math.h"

namespace trainrt {

namespace {

// ---- SumExp(scores, row_max): sum over `axis` of exp(scores - row_max).

constexpr int64_t kBlock = 256;

// Calls fn(scores, begin, end) for blocks of a row, as numbers that are computed in.
template <typename T, typename Fn>
void for_each_block(const T* row, int64_t n, Fn&& fn) {
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(n, begin + kBlock);
    if constexpr (is_half<T>) {
      float scores[kBlock];
      convert_elements(DTypeOf<T>::value, row + begin, DType::kFloat32, scores, end - begin);
      fn(scores, begin, end);
    } else {
      fn(row + begin, begin, end);
    }
  }
}

template <typename T>
double sum_exp_row(const T* row, int64_t n, Compute<T> max) {
  using C = Compute<T>;
  // Blocks in the narrow type, so that the loop is vector code; block sums in double.
  double sum = 0;
  for_each_block(row, n, [&sum, max](const C* scores, int64_t begin, int64_t end) {
    C lanes[16] = {};
    int64_t i = 0;
    for (; i + 16 <= end - begin; i += 16) {
      for (int j = 0; j < 16; ++j) {
        lanes[j] += vmath::exp(scores[i + j] - max);
      }
    }
    for (; i < end - begin; ++i) {
      lanes[i % 16] += vmath::exp(scores[i] - max);
    }
    for (const C lane : lanes) {
      sum += static_cast<double>(lane);
    }
  });
  return sum;
}

template <bool kReference>
void sum_exp_kernel(KernelContext& k) {
  const ClassLayout layout = class_layout(k.input_shape(0), k.attributes());
  dispatch_real(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    using C = Compute<T>;
    const T* scores = k.input<T>(0);
    const T* maxima = k.input<T>(1);
    C* sums = k.output<C>(0);
    k.parallel_for(layout.items(), row_grain(layout.classes), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T* row = scores + layout.base(i);
        double sum = 0;
        if (!kReference && layout.inner == 1) {
          sum = sum_exp_row(row, layout.classes, load<C>(maxima[i]));
        } else {
          for (int64_t v = 0; v < layout.classes; ++v) {
            sum += std::exp(load<double>(row[v * layout.inner]) - load<double>(maxima[i]));
          }
        }
        sums[i] = static_cast<C>(sum);
      }
    });
  });
}

const RegisterOp kSumExp{{
    .name = "SumExp",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      const Shape items = item_shape(op.input_shape(0), op.attributes());
      const TensorType maxima{op.input_dtype(0), items};
      TRAINRT_REQUIRE(op.input_type(1) == maxima,
                      kInvalidModel,
                      "SumExp: row_max is ",
                      dtype_name(op.input_dtype(1)),
                      shape_string(op.input_shape(1)),
                      ", wanted ",
                      dtype_name(maxima.dtype),
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

void require_statistic_types(const OpContext& op) {
  const DType scores = op.input_dtype(0), sums = statistic_dtype(scores);
  TRAINRT_REQUIRE(op.input_dtype(2) == scores && op.input_dtype(3) == sums,
                  kInvalidModel,
                  "cross-entropy: scores are ",
                  dtype_name(scores),
                  ", so row_max must be, too, and sum_exp ",
                  dtype_name(sums),
                  "; they are ",
                  dtype_name(op.input_dtype(2)),
                  " and ",
                  dtype_name(op.input_dtype(3)));
}

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
  require_statistic_types(op);
  if (op.attributes().get_string("reduction", "sum") == "none") {
    return {{statistic_dtype(op.input_dtype(0)), items}};
  }
  return {{DType::kFloat64, {}}};
}

// Weight of a label; one outside the classes (ItemCount refuses it) weighs nothing.
template <typename C>
double label_weight(const KernelContext& k, const C* weights, int input, int64_t label) {
  if (weights == nullptr) {
    return 1;
  }
  return label >= 0 && label < k.input_shape(input)[0] ? static_cast<double>(weights[label]) : 0;
}

// The loss of items [begin, end), to `items` if that is not null; returns their sum.
template <typename T, typename Label>
double loss_of_items(const KernelContext& k,
                     const ClassLayout& layout,
                     int64_t begin,
                     int64_t end,
                     Compute<T>* items) {
  using C = Compute<T>;
  const IgnoreIndex ignore(k.attributes());
  const T* scores = k.input<T>(0);
  const Label* labels = k.input<Label>(1);
  const T* maxima = k.input<T>(2);
  const C* sums = k.input<C>(3);
  const C* weights = k.input<C>(4);
  double total = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t label = static_cast<int64_t>(labels[i]);
    double loss = 0;
    if (!ignore.matches(label)) {
      const int64_t local = label - layout.offset;
      if (layout.offset == 0) {
        loss += load<double>(maxima[i]) + std::log(static_cast<double>(sums[i]));
      }
      if (local >= 0 && local < layout.classes) {
        loss -= load<double>(scores[layout.base(i) + local * layout.inner]);
      }
      loss *= label_weight(k, weights, 4, label);
    }
    total += loss;
    if (items != nullptr) {
      items[i] = static_cast<C>(loss);
    }
  }
  return total;
}

void cross_entropy_kernel(KernelContext& k) {
  const ClassLayout layout = class_layout(k.input_shape(0), k.attributes());
  const bool none = k.attributes().get_string("reduction", "sum") == "none";
  dispatch_real(k.input_dtype(0), [&](auto tag) {
    dispatch_labels(k.input_dtype(1), [&](auto label_tag) {
      using T = decltype(tag);
      using Label = decltype(label_tag);
      require_labels<Label>(k, 1);
      Compute<T>* items = none ? k.output<Compute<T>>(0) : nullptr;
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

// The gradient of a row whose classes lie one after the other; `local`: the label's place in it.
template <typename T>
void gradient_of_row(const T* row,
                     T* grad,
                     int64_t n,
                     Compute<T> max,
                     Compute<T> factor,
                     int64_t local,
                     Compute<T> upstream) {
  using C = Compute<T>;
  for_each_block(row, n, [=](const C* scores, int64_t begin, int64_t end) {
    C rounded_later[is_half<T> ? kBlock : 1];
    C* to = rounded_later;
    if constexpr (!is_half<T>) {
      to = grad + begin;
    }
    for (int64_t v = 0; v < end - begin; ++v) {
      to[v] = vmath::exp(scores[v] - max) * factor;
    }
    if (local >= begin && local < end) {
      to[local - begin] -= upstream;
    }
    if constexpr (is_half<T>) {
      convert_elements(DType::kFloat32, to, DTypeOf<T>::value, grad + begin, end - begin);
    }
  });
}

template <typename T, typename Label, bool kReference>
void gradient_of_items(const KernelContext& k,
                       const ClassLayout& layout,
                       int64_t begin,
                       int64_t end) {
  using C = Compute<T>;
  const IgnoreIndex ignore(k.attributes());
  const Label* labels = k.input<Label>(1);
  const C* weights = k.input<C>(5);
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
        (per_item ? static_cast<double>(k.input<C>(4)[i]) : k.input<double>(4)[0]) *
        label_weight(k, weights, 5, label);
    const C max = load<C>(k.input<T>(2)[i]);
    const C factor = static_cast<C>(upstream / static_cast<double>(k.input<C>(3)[i]));
    const int64_t local = label - layout.offset;
    if (!kReference && layout.inner == 1) {
      gradient_of_row(row, grad, layout.classes, max, factor, local, static_cast<C>(upstream));
      continue;
    }
    for (int64_t v = 0; v < layout.classes; ++v) {
      const C p = std::exp(load<C>(row[v * layout.inner]) - max) * factor;
      grad[v * layout.inner] = store<T>(v == local ? p - static_cast<C>(upstream) : p);
    }
  }
}

template <bool kReference>
void cross_entropy_grad_kernel(KernelContext& k) {
  const ClassLayout layout = class_layout(k.input_shape(0), k.attributes());
  dispatch_real(k.input_dtype(0), [&](auto tag) {
    dispatch_labels(k.input_dtype(1), [&](auto label_tag) {
      k.parallel_for(layout.items(), row_grain(layout.classes), [&](int64_t begin, int64_t end) {
        gradient_of_items<decltype(tag), decltype(label_tag), kReference>(k, layout, begin, end);
      });
    });
  });
}

const RegisterOp kSoftmaxCrossEntropyGrad{{
    .name = "SoftmaxCrossEntropyGrad",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      require_statistic_types(op);
      return {op.input_type(0)};
    },
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
