// `--loss auto`: what the model's outputs and the data's labels say about the loss.
//
//   a scalar float output                      -> that output
//   integer labels / float labels              -> cross-entropy / mean squared error
//   none, integer input and [batch, seq, V]    -> next-token cross-entropy
//   none otherwise                             -> classes for an output of two or more, else
//   targets
#include <algorithm>

#include "graph/base/log.h"
#include "graph/loss.h"
#include "graph/passes/sample_rows.h"

namespace trainrt {

namespace {

// Labels: the input named by --labels, or else an input that no node reads.
const Value* label_input(const Graph& graph, const std::string& name) {
  if (!name.empty()) {
    const std::optional<ValueId> id = graph.find_value(name);
    return id && graph.value(*id).kind == ValueKind::kInput ? &graph.value(*id) : nullptr;
  }
  const std::vector<std::vector<NodeId>> consumers = graph.consumers();
  for (const ValueId id : graph.values_of_kind(ValueKind::kInput)) {
    const std::vector<ValueId>& outputs = graph.outputs();
    if (consumers[static_cast<size_t>(id)].empty() &&
        std::find(outputs.begin(), outputs.end(), id) == outputs.end()) {
      return &graph.value(id);
    }
  }
  return nullptr;
}

bool is_loss_scalar(const Value& value) {
  return is_floating(value.type.dtype) && num_elements(value.type.shape) == 1 &&
         value.type.shape.size() <= 1;
}

const Value& choose_output(const Graph& graph, const LossSpec& wanted) {
  TRAINRT_REQUIRE(!graph.outputs().empty(), kInvalidModel, "the model has no output");
  std::vector<std::string> names;
  for (const ValueId id : graph.outputs()) {
    names.push_back(graph.value(id).name);
    if (names.back() == wanted.output) {
      return graph.value(id);
    }
  }
  TRAINRT_REQUIRE(wanted.output.empty(),
                  kInvalidArgument,
                  "the model has no output '",
                  wanted.output,
                  "'",
                  did_you_mean(wanted.output, names));
  if (wanted.kind == "auto" || wanted.kind == "output") {
    // With a batch of one a [1] output may be a prediction: only a true scalar counts then.
    for (const ValueId id : graph.outputs()) {
      if (is_loss_scalar(graph.value(id)) &&
          (graph.value(id).type.shape.empty() || micro_batch_size(graph) > 1)) {
        return graph.value(id);
      }
    }
  }
  for (const ValueId id : graph.outputs()) {
    if (is_floating(graph.value(id).type.dtype)) {
      return graph.value(id);
    }
  }
  TRAINRT_FAIL(kInvalidArgument,
               "no output of the model is float (the first is '",
               names[0],
               "'), so none can carry a loss; name one with --output");
}

// An integer input with the dims of the output before its last: token ids under language model
// scores.
bool is_language_model(const Graph& graph, const Value& output) {
  if (output.type.shape.size() != 3) {
    return false;
  }
  const Shape items(output.type.shape.begin(), output.type.shape.end() - 1);
  for (const ValueId id : graph.values_of_kind(ValueKind::kInput)) {
    const TensorType& type = graph.value(id).type;
    if (is_integer(type.dtype) && type.shape == items) {
      return true;
    }
  }
  return false;
}

// The axis of the output along which the samples lie. It is axis 0 unless an input puts them
// elsewhere (time first).
int sample_axis(const Graph& graph, const Value& output) {
  int of_inputs = 0;
  for (const ValueId id : graph.values_of_kind(ValueKind::kInput)) {
    of_inputs = std::max(of_inputs, graph.value(id).batch_axis);
  }
  if (of_inputs == 0) {
    return 0;
  }
  const SampleCourse course = follow_samples(graph);
  const std::optional<ValueId> id = graph.find_value(output.name);
  if (id && !course.axes.empty() && course.axes[static_cast<size_t>(*id)] >= 0) {
    return course.axes[static_cast<size_t>(*id)];
  }
  // They could not be followed, or are one: the sizes are left.
  const Shape& shape = output.type.shape;
  const int64_t batch = micro_batch_size(graph);
  const bool like_inputs = of_inputs < static_cast<int>(shape.size()) &&
                           shape[static_cast<size_t>(of_inputs)] == batch && shape[0] != batch;
  return like_inputs ? of_inputs : 0;
}

// Classes lie on axis 1, or last in a language model and where axis 1 has the samples.
Shape class_label_shape(const Graph& graph, const Value& output) {
  Shape shape = output.type.shape;
  if (shape.size() >= 2) {
    const bool last = is_language_model(graph, output) || sample_axis(graph, output) == 1;
    shape.erase(last ? shape.end() - 1 : shape.begin() + 1);
  }
  return shape;
}

// Labels lie as the output does: an array's samples, which come first in `labels_shape`, are moved
// to where the output has them.
void place_labels(const Graph& graph, const Value& output, bool of_array, LossSpec& spec) {
  const int last = static_cast<int>(spec.labels_shape.size()) - 1;
  spec.labels_batch_axis = std::clamp(sample_axis(graph, output), 0, std::max(0, last));
  if (of_array && spec.labels_batch_axis > 0) {
    const auto first = spec.labels_shape.begin();
    std::rotate(first, first + 1, first + 1 + spec.labels_batch_axis);
  }
}

void infer_kind(const Graph& graph, const Value& output, const TensorType* labels, LossSpec& spec) {
  if (labels != nullptr) {
    spec.kind = is_floating(labels->dtype) ? "mse" : "softmax_cross_entropy";
  } else if (is_language_model(graph, output)) {
    spec.kind = "softmax_cross_entropy";
    spec.next_token = true;
  } else {
    const Shape& shape = output.type.shape;
    spec.kind = shape.size() >= 2 && shape[1] >= 2 ? "softmax_cross_entropy" : "mse";
  }
}

}  // namespace

LossSpec resolve_loss(const Graph& forward, const LossSpec& wanted, const TensorType* labels) {
  static const std::vector<std::string> kKinds = {
      "auto", "softmax_cross_entropy", "nll", "mse", "bce_with_logits", "l1", "output"};
  LossSpec spec = wanted;
  if (spec.kind.rfind("output:", 0) == 0) {
    spec.output = spec.kind.substr(7);
    spec.kind = "output";
  }
  TRAINRT_REQUIRE(std::find(kKinds.begin(), kKinds.end(), spec.kind) != kKinds.end(),
                  kInvalidArgument,
                  "unknown loss '",
                  spec.kind,
                  "'; wanted auto, softmax_cross_entropy, nll, mse, bce_with_logits, l1 or "
                  "output:NAME",
                  did_you_mean(spec.kind, kKinds));
  const Value& output = choose_output(forward, spec);
  spec.output = output.name;
  if (spec.kind == "output" ||
      (spec.kind == "auto" && wanted.output.empty() && is_loss_scalar(output) &&
       (output.type.shape.empty() || micro_batch_size(forward) > 1))) {
    spec.kind = "output";
    return spec;
  }
  const Value* input = label_input(forward, spec.labels);
  const bool of_array = labels != nullptr && input == nullptr;
  if (input != nullptr) {
    spec.labels = input->name;
    labels = &input->type;
  }
  if (spec.kind == "auto") {
    infer_kind(forward, output, labels, spec);
  } else if (spec.kind == "softmax_cross_entropy" && labels == nullptr) {
    spec.next_token = is_language_model(forward, output);
  }
  const bool classes = spec.kind == "softmax_cross_entropy" || spec.kind == "nll";
  if (spec.kind == "softmax_cross_entropy" && output.producer != kNoNode &&
      forward.node(output.producer).op_type == "Softmax") {
    log_warning("output '",
                output.name,
                "' is made by a Softmax, and loss softmax_cross_entropy applies one of its own: "
                "export the model without it, with the scores '",
                forward.value(forward.node(output.producer).inputs[0]).name,
                "' for an output, or take another loss");
  }
  if (labels != nullptr) {
    TRAINRT_REQUIRE(!classes || is_integer(labels->dtype),
                    kInvalidArgument,
                    "loss ",
                    spec.kind,
                    " wants integer class labels, the labels are ",
                    dtype_name(labels->dtype),
                    shape_string(labels->shape));
    spec.labels_dtype = labels->dtype;
    spec.labels_shape = labels->shape;
  } else {
    spec.labels_dtype = classes ? DType::kInt64 : output.type.dtype;
    spec.labels_shape = classes ? class_label_shape(forward, output) : output.type.shape;
  }
  if (input == nullptr) {
    place_labels(forward, output, of_array, spec);
  }
  if (spec.labels.empty()) {
    spec.labels = "labels";
    while (forward.find_value(spec.labels)) {
      spec.labels += "_";
    }
  }
  return spec;
}

}  // namespace trainrt
