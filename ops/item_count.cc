// The divisor of the loss: N = the summed weight of the valid items. Counted from the labels alone,
// before the first forward of a step, so that 1/N can seed every backward of it.
//
// ItemCount also refuses labels outside the classes, since it sees them before any kernel that
// would use one as an index.
#include "graph/autodiff.h"
#include "graph/graph_builder.h"
#include "ops/class_axis.h"
#include "ops/item_blocks.h"

namespace trainrt {

namespace {

template <typename Label>
double count_labels(const KernelContext& k) {
  const IgnoreIndex ignore(k.attributes());
  const int64_t num_classes = k.attributes().get_int("num_classes", -1);
  const std::vector<double> weights = k.has_input(1)
                                          ? Tensor(k.input_dtype(1),
                                                   k.input_shape(1),
                                                   nullptr,
                                                   static_cast<std::byte*>(k.raw_input(1)))
                                                .to_double()
                                          : std::vector<double>{};
  const Label* labels = k.input<Label>(0);
  double count = 0;
  for (int64_t i = 0; i < num_elements(k.input_shape(0)); ++i) {
    const int64_t label = static_cast<int64_t>(labels[i]);
    if (ignore.matches(label)) {
      continue;
    }
    const int64_t classes =
        num_classes >= 0 || weights.empty() ? num_classes : static_cast<int64_t>(weights.size());
    if (classes >= 0) {
      require_label(label, i, classes, ignore);
    }
    count += weights.empty() ? 1.0 : weights[static_cast<size_t>(label)];
  }
  return count;
}

void item_count_kernel(KernelContext& k) {
  double& count = *k.output<double>(0);
  if (is_floating(k.input_dtype(0))) {
    count = static_cast<double>(num_elements(k.input_shape(0)));
  } else {
    dispatch_labels(k.input_dtype(0), [&](auto tag) { count = count_labels<decltype(tag)>(k); });
  }
}

// ItemCount(labels[, weights]): float64 scalar. Float labels count every element.
const RegisterOp kItemCount{{
    .name = "ItemCount",
    .infer_types = [](const OpContext&) -> TensorTypes {
      return {{DType::kFloat64, {}}};
    },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      std::string dims;
      for (size_t d = 0; d < op.input_shape(0).size(); ++d) {
        dims += concat("a", d) + " ";
      }
      Factors factors(op, dims + (op.num_inputs() > 1 ? ",w" : "") + "->");
      if (op.has_input(1)) {
        factors.whole("w");
      }
      for (size_t d = 0; d < op.input_shape(0).size(); ++d) {
        factors.reduction(concat("a", d));
      }
      return factors;
    },
    .reference_kernel = item_count_kernel,
    .not_differentiable = true,
    .workspace = [](const OpContext& op,
                    const DeviceSpec& spec) { return device_item_workspace(op, spec, 0); },
    .examples = {{.name = "ignored",
                  .attributes = {{"ignore_index", int64_t{2}}},
                  .inputs = {{DType::kInt64, {2, 3}}},
                  .values = {Tensor::from<int64_t>({3, 0, 2, 1, 1, 0}, {2, 3})}},
                 {.name = "weighted",
                  .inputs = {{DType::kInt64, {4}}, {DType::kFloat32, {3}}},
                  .values = {Tensor::from<int64_t>({2, 0, 1, 1}, {4}), Tensor{}}},
                 {.name = "elements", .inputs = {{DType::kFloat32, {4, 2}}}}},
}};

// MeanLoss(sum, count): the scalar of a loss with reduction=mean, in the dtype of the model.
// build_training_graph() looks through it, so that N is counted over the whole step.
const RegisterOp kMeanLoss{{
    .name = "MeanLoss",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      return {{dtype_from_name(op.attributes().get_string("result", "float32")).value(), {}}};
    },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op); },
    .sharding = [](const OpContext& op) -> ShardingRule { return Factors::whole(op); },
    .reference_kernel =
        [](KernelContext& k) {
          const double mean = *k.input<double>(0) / *k.input<double>(1);
          dispatch_floating(k.output_dtype(0), [&](auto tag) {
            *k.output<decltype(tag)>(0) = static_cast<decltype(tag)>(mean);
          });
        },
    .gradient =
        [](GradientBuilder& g) {
          if (g.needs_grad(0)) {
            g.set_input_grad(0, g.div(g.cast(g.output_grad(0), DType::kFloat64), g.input(1)));
          }
        },
    .examples = {{.name = "scalar",
                  .attributes = {{"result", std::string("float64")}},
                  .inputs = {{DType::kFloat64, {}}, {DType::kFloat64, {}}},
                  .low = 1,
                  .high = 2,
                  .check_gradient = {0}}},
}};

// ShiftLabels(ids): labels of a language model, labels[s] = ids[s + 1] along `axis`; the last
// position has no successor and becomes `ignore_index`.
void shift_labels_kernel(KernelContext& k) {
  const Shape& shape = k.input_shape(0);
  const int ndim = static_cast<int>(shape.size());
  const int axis = normalize_axis(k.attributes().get_int("axis"), ndim);
  const int64_t length = shape[static_cast<size_t>(axis)];
  const int64_t inner = dims_product(shape, axis + 1, ndim);
  const int64_t ignore = k.attributes().get_int("ignore_index");
  dispatch_labels(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T* ids = k.input<T>(0);
    T* labels = k.output<T>(0);
    for (int64_t i = 0; i < num_elements(shape); ++i) {
      labels[i] = (i / inner) % length + 1 < length ? ids[i + inner] : static_cast<T>(ignore);
    }
  });
}

const RegisterOp kShiftLabels{{
    .name = "ShiftLabels",
    .infer_types = [](const OpContext& op) -> TensorTypes { return {op.input_type(0)}; },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      return Factors::elementwise(op).whole_axis(op.axis(1));
    },
    .reference_kernel = shift_labels_kernel,
    .not_differentiable = true,
    .examples = {{.name = "rows",
                  .attributes = {{"axis", int64_t{1}}, {"ignore_index", int64_t{-100}}},
                  .inputs = {{DType::kInt64, {2, 3}}},
                  .values = {Tensor::from<int64_t>({3, 0, 2, 1, 1, 0}, {2, 3})}}},
}};

}  // namespace

}  // namespace trainrt
