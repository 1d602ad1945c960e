// Counting correctly classified items, in two pieces so that the classes can be sharded:
// FirstMaxIndex gives the first class whose score equals the maximum (the minimum over shards of
// each shard's first), CorrectCount compares it with the label. A tie goes to the first class, as
// argmax has it, so a model that answers all zeros does not pass for perfect.
#include <limits>

#include "ops/class_axis.h"
#include "ops/item_blocks.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

void first_max_index_kernel(KernelContext& k) {
  const ClassLayout layout = class_layout(k.input_shape(0), k.attributes());
  dispatch_real(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T* scores = k.input<T>(0);
    const T* maxima = k.input<T>(1);
    int64_t* index = k.output<int64_t>(0);
    const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, layout.classes));
    k.parallel_for(layout.items(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        index[i] = std::numeric_limits<int64_t>::max();
        const T* row = scores + layout.base(i);
        for (int64_t v = 0; v < layout.classes; ++v) {
          if (load<double>(row[v * layout.inner]) == load<double>(maxima[i])) {
            index[i] = layout.offset + v;
            break;
          }
        }
      }
    });
  });
}

const RegisterOp kFirstMaxIndex{{
    .name = "FirstMaxIndex",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      return {{DType::kInt64, item_shape(op.input_shape(0), op.attributes())}};
    },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      const ClassEquation e = class_equation(op);
      return Factors(op, e.scores + "," + e.items + "->" + e.items)
          .reduction("v", ReductionKind::kMin);
    },
    .reference_kernel = first_max_index_kernel,
    .not_differentiable = true,
    .localize = localize_classes,
    .examples = {{.name = "tie",
                  .attributes = {{"axis", int64_t{-1}}},
                  .inputs = {{DType::kFloat32, {2, 4}}, {DType::kFloat32, {2}}},
                  .values = {Tensor::from<float>({0, 3, 3, 1, 2, 1, 0, 2}, {2, 4}),
                             Tensor::from<float>({3, 2}, {2})}}},
}};

const RegisterOp kCorrectCount{{
    .name = "CorrectCount",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      TRAINRT_REQUIRE(op.input_shape(0) == op.input_shape(1),
                      kInvalidModel,
                      "CorrectCount: predictions are ",
                      shape_string(op.input_shape(0)),
                      ", labels ",
                      shape_string(op.input_shape(1)));
      return {{DType::kFloat64, {}}};
    },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      std::string dims;
      for (size_t d = 0; d < op.input_shape(0).size(); ++d) {
        dims += concat("a", d) + " ";
      }
      Factors factors(op, dims + "," + dims + "->");
      for (size_t d = 0; d < op.input_shape(0).size(); ++d) {
        factors.reduction(concat("a", d));
      }
      return factors;
    },
    .reference_kernel =
        [](KernelContext& k) {
          const IgnoreIndex ignore(k.attributes());
          double count = 0;
          dispatch_labels(k.input_dtype(1), [&](auto tag) {
            const int64_t* predicted = k.input<int64_t>(0);
            const auto* labels = k.input<decltype(tag)>(1);
            for (int64_t i = 0; i < num_elements(k.input_shape(1)); ++i) {
              const int64_t label = static_cast<int64_t>(labels[i]);
              count += !ignore.matches(label) && label == predicted[i] ? 1 : 0;
            }
          });
          *k.output<double>(0) = count;
        },
    .not_differentiable = true,
    .workspace = [](const OpContext& op,
                    const DeviceSpec& spec) { return device_item_workspace(op, spec, 1); },
    .examples = {{.name = "ignored",
                  .attributes = {{"ignore_index", int64_t{-100}}},
                  .inputs = {{DType::kInt64, {4}}, {DType::kInt64, {4}}},
                  .values = {Tensor::from<int64_t>({0, 1, 2, 3}, {4}),
                             Tensor::from<int64_t>({0, 2, -100, 3}, {4})}}},
}};

}  // namespace

}  // namespace trainrt
