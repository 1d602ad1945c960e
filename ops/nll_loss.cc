// Negative log-likelihood of log-probabilities l: an item with label y costs -w_y l_y, and its
// gradient is -w_y at y and zero elsewhere. Sharded along the classes each shard takes the labels
// in its own range.
#include "graph/autodiff.h"
#include "ops/class_axis.h"
#include "ops/cross_entropy.h"
#include "ops/item_blocks.h"

namespace trainrt {

namespace {

// Weight of a label; a label outside the classes (ItemCount refuses it) weighs nothing.
template <typename T>
double label_weight(const KernelContext& k, int weights_input, int64_t label) {
  if (!k.has_input(weights_input)) {
    return 1;
  }
  const int64_t n = k.input_shape(weights_input)[0];
  return label >= 0 && label < n ? static_cast<double>(k.input<T>(weights_input)[label]) : 0;
}

template <typename T, typename Label>
double loss_of_items(
    const KernelContext& k, const ClassLayout& layout, int64_t begin, int64_t end, T* items) {
  const IgnoreIndex ignore(k.attributes());
  const T* scores = k.input<T>(0);
  const Label* labels = k.input<Label>(1);
  double total = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t label = static_cast<int64_t>(labels[i]);
    const int64_t local = label - layout.offset;
    double loss = 0;
    if (!ignore.matches(label) && local >= 0 && local < layout.classes) {
      loss = -static_cast<double>(scores[layout.base(i) + local * layout.inner]) *
             label_weight<T>(k, 2, label);
    }
    total += loss;
    if (items != nullptr) {
      items[i] = static_cast<T>(loss);
    }
  }
  return total;
}

void nll_kernel(KernelContext& k) {
  const ClassLayout layout = class_layout(k.input_shape(0), k.attributes());
  const bool none = k.attributes().get_string("reduction", "sum") == "none";
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    dispatch_labels(k.input_dtype(1), [&](auto label_tag) {
      using T = decltype(tag);
      require_labels<decltype(label_tag)>(k, 1);
      T* items = none ? k.output<T>(0) : nullptr;
      // One score per item is touched: not worth threads.
      double sum = 0;
      for (int64_t begin = 0; begin < layout.items(); begin += kItemGrain) {
        sum += loss_of_items<T, decltype(label_tag)>(
            k, layout, begin, std::min(layout.items(), begin + kItemGrain), items);
      }
      if (!none) {
        *k.output<double>(0) = sum;
      }
    });
  });
}

void nll_grad_kernel(KernelContext& k) {
  const ClassLayout layout = class_layout(k.input_shape(0), k.attributes());
  const IgnoreIndex ignore(k.attributes());
  const bool per_item = !k.input_shape(2).empty() || k.input_dtype(2) != DType::kFloat64;
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    dispatch_labels(k.input_dtype(1), [&](auto label_tag) {
      using T = decltype(tag);
      using Label = decltype(label_tag);
      const int64_t grain =
          std::max<int64_t>(1, 16384 / std::max<int64_t>(1, layout.classes * layout.inner));
      k.parallel_for(layout.outer, grain, [&](int64_t begin, int64_t end) {
        T* grad = k.output<T>(0);
        std::fill(grad + begin * layout.classes * layout.inner,
                  grad + end * layout.classes * layout.inner,
                  T(0));
        for (int64_t i = begin * layout.inner; i < end * layout.inner; ++i) {
          const int64_t label = static_cast<int64_t>(k.input<Label>(1)[i]);
          const int64_t local = label - layout.offset;
          if (!ignore.matches(label) && local >= 0 && local < layout.classes) {
            const double upstream =
                per_item ? static_cast<double>(k.input<T>(2)[i]) : k.input<double>(2)[0];
            grad[layout.base(i) + local * layout.inner] =
                static_cast<T>(-upstream * label_weight<T>(k, 3, label));
          }
        }
      });
    });
  });
}

ShardingRule nll_sharding(const OpContext& op) {
  const ClassEquation e = class_equation(op);
  const bool none = op.attributes().get_string("reduction", "sum") == "none";
  Factors factors(
      op,
      e.scores + "," + e.items + (op.num_inputs() > 2 ? ",w" : "") + "->" + (none ? e.items : ""));
  if (op.has_input(2)) {
    factors.whole("w");
  }
  factors.reduction("v");
  factors.linear({{0}});
  return none ? factors : reduce_items(factors, op);
}

const RegisterOp kNegativeLogLikelihoodLoss{{
    .name = "NegativeLogLikelihoodLoss",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      const Shape items = item_shape(op.input_shape(0), op.attributes());
      TRAINRT_REQUIRE(op.input_shape(1) == items,
                      kInvalidModel,
                      "NegativeLogLikelihoodLoss: labels are ",
                      shape_string(op.input_shape(1)),
                      ", wanted ",
                      shape_string(items));
      if (op.attributes().get_string("reduction", "sum") == "none") {
        return {{op.input_dtype(0), items}};
      }
      return {{DType::kFloat64, {}}};
    },
    .cost = [](const OpContext& op) -> Cost {
      Cost cost;
      cost.flops = 2.0 * static_cast<double>(op.num_elements(1));
      cost.bytes = 2.0 * static_cast<double>(op.input_type(1).bytes());
      return cost;
    },
    .sharding = nll_sharding,
    .reference_kernel = nll_kernel,
    .gradient =
        [](GradientBuilder& g) {
          Attributes attributes = g.attributes();
          attributes.erase("reduction");
          std::vector<ValueId> inputs = {g.input(0), g.input(1), g.output_grad(0)};
          if (g.input(2) != kNoValue) {
            inputs.push_back(g.input(2));
          }
          if (g.needs_grad(0)) {
            g.set_input_grad(0, g.op("NegativeLogLikelihoodGrad", inputs, attributes));
          }
        },
    .upgrade = upgrade_negative_log_likelihood,
    .localize = localize_classes,
    .workspace = [](const OpContext& op,
                    const DeviceSpec& spec) { return device_item_workspace(op, spec, 1); },
    .examples = {{.name = "sum",
                  .attributes = {{"ignore_index", int64_t{2}}},
                  .inputs = {{DType::kFloat32, {2, 4, 3}}, {DType::kInt64, {2, 3}}},
                  .values = {Tensor{}, Tensor::from<int64_t>({3, 0, 2, 1, 1, 0}, {2, 3})}}},
}};

// (scores, labels, upstream[, weights]); of the scores only the type is read.
const RegisterOp kNegativeLogLikelihoodGrad{{
    .name = "NegativeLogLikelihoodGrad",
    .infer_types = [](const OpContext& op) -> TensorTypes { return {op.input_type(0)}; },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op, 1); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      const ClassEquation e = class_equation(op);
      Factors factors(op,
                      e.scores + "," + e.items + "," + (op.input_shape(2).empty() ? "" : e.items) +
                          (op.num_inputs() > 3 ? ",w" : "") + "->" + e.scores);
      if (op.has_input(3)) {
        factors.whole("w");
      }
      return factors;
    },
    .reference_kernel = nll_grad_kernel,
    .not_differentiable = true,
    .localize = localize_classes,
    .inplace = {{0, 0}},
    .examples =
        {{.name = "sum",
          .attributes = {{"ignore_index", int64_t{2}}},
          .inputs = {{DType::kFloat32, {2, 4, 3}}, {DType::kInt64, {2, 3}}, {DType::kFloat64, {}}},
          .values = {Tensor{},
                     Tensor::from<int64_t>({3, 0, 2, 1, 1, 0}, {2, 3}),
                     Tensor::scalar<double>(0.5)}}},
}};

}  // namespace

}  // namespace trainrt
