// The layout that classification losses share: scores [outer..., classes, inner...] with labels
// [outer..., inner...], the class axis being 1 in ONNX's losses and last in language models.
//
// The class dim can be sharded (vocabulary-parallel): every operator here then sees the classes
// [class_offset, class_offset + classes) and keeps to those labels that fall into its range.
#pragma once

#include <string>

#include "graph/op_def.h"
#include "ops/host_device.h"

namespace trainrt {

struct ClassLayout {
  int axis = 1;
  int64_t outer = 1;
  int64_t classes = 1;  // of this shard
  int64_t inner = 1;
  int64_t offset = 0;  // of this shard
  TRAINRT_HOST_DEVICE int64_t items() const { return outer * inner; }
  // Position of item `i`'s score for the shard's class 0; classes are `inner` apart.
  TRAINRT_HOST_DEVICE int64_t base(int64_t i) const {
    return i / inner * classes * inner + i % inner;
  }
};

inline ClassLayout class_layout(const Shape& scores, const Attributes& attributes) {
  ClassLayout layout;
  const int ndim = static_cast<int>(scores.size());
  layout.axis = normalize_axis(attributes.get_int("axis", 1), ndim);
  layout.outer = dims_product(scores, 0, layout.axis);
  layout.classes = scores[static_cast<size_t>(layout.axis)];
  layout.inner = dims_product(scores, layout.axis + 1, ndim);
  layout.offset = attributes.get_int("class_offset", 0);
  return layout;
}

// `scores` without the class axis: the shape of labels, row_max and sum_exp.
inline Shape item_shape(const Shape& scores, const Attributes& attributes) {
  Shape shape = scores;
  shape.erase(shape.begin() +
              normalize_axis(attributes.get_int("axis", 1), static_cast<int>(scores.size())));
  return shape;
}

// Equation text for a tensor like the scores ("a0 a1 v a2") and for one like the labels.
struct ClassEquation {
  std::string scores;
  std::string items;
};

inline ClassEquation class_equation(const OpContext& op, int scores_input = 0) {
  ClassEquation equation;
  const Shape& shape = op.input_shape(scores_input);
  const int axis =
      normalize_axis(op.attributes().get_int("axis", 1), static_cast<int>(shape.size()));
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    const std::string dim = d == axis ? "v" : concat("a", d);
    equation.scores += dim + " ";
    equation.items += d == axis ? "" : dim + " ";
  }
  return equation;
}

// Marks every dim of the items as a reduction: a loss or a count is a sum over them.
inline Factors& reduce_items(Factors& factors, const OpContext& op, int scores_input = 0) {
  const Shape& shape = op.input_shape(scores_input);
  const int axis =
      normalize_axis(op.attributes().get_int("axis", 1), static_cast<int>(shape.size()));
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    if (d != axis) {
      factors.reduction(concat("a", d));
    }
  }
  return factors;
}

// LocalizeFn of all of them: a shard of the class dim (factor "v") carries its offset.
inline Attributes localize_classes(const OpContext& op, const FactorShard& shard) {
  Attributes attributes = op.attributes();
  if (get_op(op.node().op_type).sharding(op).find("v") == shard.factor) {
    attributes.set("class_offset", attributes.get_int("class_offset", 0) + shard.offset);
  }
  return attributes;
}

// Calls fn with the labels as int32_t or int64_t.
template <typename Fn>
void dispatch_labels(DType dtype, Fn&& fn) {
  if (dtype == DType::kInt32) {
    fn(int32_t{});
  } else if (dtype == DType::kInt64) {
    fn(int64_t{});
  } else {
    TRAINRT_FAIL(kInvalidModel, "class labels are ", dtype_name(dtype), ", wanted int32 or int64");
  }
}

// The label that is left out of loss and count; none when the attribute is missing.
struct IgnoreIndex {
  explicit IgnoreIndex(const Attributes& attributes)
      : present(attributes.has("ignore_index")), value(attributes.get_int("ignore_index", 0)) {}
  TRAINRT_HOST_DEVICE bool matches(int64_t label) const { return present && label == value; }
  bool present;
  int64_t value;
};

// Label `i` is one of `classes`, or ignored.
inline void require_label(int64_t label, int64_t i, int64_t classes, const IgnoreIndex& ignore) {
  TRAINRT_REQUIRE(ignore.matches(label) || (label >= 0 && label < classes),
                  kInvalidArgument,
                  "class label ",
                  label,
                  " at item ",
                  i,
                  " of a micro-batch; the model's output "
                  "has ",
                  classes,
                  " classes, so labels must lie in [0, ",
                  classes,
                  ignore.present ? concat(") or be ", ignore.value, " (ignored)") : ")");
}

// The labels of a loss that no ItemCount sees: it has `num_classes`, of all shards.
template <typename Label>
void require_labels(const KernelContext& k, int input) {
  if (!k.attributes().has("num_classes")) {
    return;
  }
  const IgnoreIndex ignore(k.attributes());
  const int64_t classes = k.attributes().get_int("num_classes");
  const Label* labels = k.input<Label>(input);
  for (int64_t i = 0; i < num_elements(k.input_shape(input)); ++i) {
    require_label(static_cast<int64_t>(labels[i]), i, classes, ignore);
  }
}

}  // namespace trainrt
