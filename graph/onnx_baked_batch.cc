#include "graph/onnx_baked_batch.h"

namespace trainrt {

namespace {

// Whether a : b = c : d. What is beyond int64 is no size of anything.
bool in_proportion(int64_t a, int64_t b, int64_t c, int64_t d) {
  int64_t outer = 0, inner = 0;
  return !__builtin_mul_overflow(a, d, &outer) && !__builtin_mul_overflow(b, c, &inner) &&
         outer == inner;
}

// The only axis on which the shapes differ, and there in proportion example : batch.
std::optional<size_t> scaled_axis(const Shape& example,
                                  const Shape& now,
                                  int64_t from,
                                  int64_t to) {
  std::optional<size_t> axis;
  if (example.size() != now.size()) {
    return axis;
  }
  for (size_t d = 0; d < now.size(); ++d) {
    if (example[d] != now[d]) {
      if (axis || !in_proportion(example[d], now[d], from, to)) {
        return std::nullopt;
      }
      axis = d;
    }
  }
  return axis;
}

int64_t elements_after(const Shape& shape, size_t axis) {
  return dims_product(shape, static_cast<int>(axis) + 1, static_cast<int>(shape.size()));
}

// Where a Reshape puts the batch. It keeps the elements in row-major order, so the batch is a digit
// with a stride: the number of elements after it. The axis of `to` that contains this digit is the
// one. The digit of an example batch of 1 fits between any two axes: it is one of size 1; else, if
// what comes after it is cut ([time, 1, features] to [time, heads, features / heads]), the first of
// the parts, as attention over all heads of all samples has it; else the axis before it ([time, 1,
// features] to [time, features]). A guess: samples_stay_apart() is asked afterwards.
std::optional<size_t> axis_of_batch(int64_t stride, int64_t batch, const Shape& to) {
  std::optional<size_t> found;
  for (size_t d = 0; d < to.size(); ++d) {
    const int64_t after = elements_after(to, d);
    const int64_t with_axis = dims_product(to, static_cast<int>(d), static_cast<int>(to.size()));
    if (after <= stride && stride * batch <= with_axis) {
      if (to[d] == batch) {
        return d;
      }
      const bool cut = found && batch == 1 && after > 1;
      found = found && !cut ? found : d;
    }
  }
  return found;
}

}  // namespace

std::optional<size_t> BatchRewriter::reshaped_axis(const Record::Node& example,
                                                   const Shape& input) {
  const std::optional<size_t> scaled = scaled_axis(example.input, input, example_.batch, batch_);
  if (!scaled) {
    return std::nullopt;
  }
  const int64_t size = example.input[*scaled];
  int64_t rows = example_.batch;  // in an axis merged with others the batch comes first,
  if (const auto it = units_.find(size); it != units_.end() && size != example_.batch) {
    if (it->second.size() > 1) {
      return std::nullopt;
    }
    rows = size / *it->second.begin();  // unless a merge into an axis of this size was seen
  }
  const int64_t elements = dims_product(
      example.input, static_cast<int>(*scaled), static_cast<int>(example.input.size()));
  const int64_t stride = elements / rows;
  const std::optional<size_t> axis = axis_of_batch(stride, example_.batch, example.output);
  if (axis && example.output[*axis] > example_.batch) {
    const int64_t after = elements_after(example.output, *axis);
    if (after > 0) {
      units_[example.output[*axis]].insert(stride / after);
    }
  }
  return axis;
}

std::optional<size_t> BatchRewriter::baked_axis(const std::string& op_type,
                                                std::optional<size_t> axis,
                                                const Shape& input,
                                                const std::vector<int64_t>& operand) const {
  if (op_type == "Reshape") {
    // [-1, 768] follows the batch by itself, [1, -1, 768] would hide it in the wrong place.
    const bool follows = axis && *axis < operand.size() && operand[*axis] <= 0;
    return follows ? std::nullopt : axis;
  }
  if (op_type == "Resize") {
    return axis && operand.size() == input.size() && operand[*axis] != input[*axis] ? axis
                                                                                    : std::nullopt;
  }
  if (extent_ != Extent::kAll) {
    return std::nullopt;
  }
  for (size_t d = 0; d < operand.size(); ++d) {
    if (operand[d] == example_.batch) {
      return d;
    }
  }
  return std::nullopt;
}

std::optional<std::vector<int64_t>> BatchRewriter::rewrite(const std::string& node,
                                                           const std::string& op_type,
                                                           const Shape& input,
                                                           const std::vector<int64_t>& operand) {
  const auto it = example_.nodes.find(node);
  if (it == example_.nodes.end()) {
    return std::nullopt;
  }
  std::optional<size_t> at;
  if (op_type == "Reshape") {
    at = reshaped_axis(it->second, input);
  } else if (op_type == "Resize") {
    at = scaled_axis(it->second.input, input, example_.batch, batch_);
  }
  if (it->second.operand != operand) {
    return std::nullopt;  // it was computed from shapes and follows the batch
  }
  const std::optional<size_t> axis = baked_axis(op_type, at, input, operand);
  if (!axis) {
    return std::nullopt;
  }
  std::vector<int64_t> changed = operand;
  const int64_t dim = op_type == "Reshape" ? it->second.output[*axis] : operand[*axis];
  changed[*axis] = dim / example_.batch * batch_;
  note(node);
  return changed;
}

bool scales_with_batch(const Shape& example, const Shape& now, int64_t from, int64_t to) {
  return example == now || scaled_axis(example, now, from, to).has_value();
}

}  // namespace trainrt
