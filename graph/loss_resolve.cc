// `--loss auto`: what the model's outputs and the data's labels say about the loss.
//
//   a scalar float output                      -> that output
//   integer labels / float labels              -> cross-entropy / mean squared error
//   none, integer input and [batch, seq, V]    -> next-token cross-entropy
//   none otherwise                             -> classes for an output of two or more, else
//   targets
#include <algorithm>
#include <set>

#include "graph/base/log.h"
#include "graph/label_place.h"
#include "graph/loss.h"

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

// A float scalar. With a batch of one a [1] output may be a prediction: only a true scalar counts
// then.
bool may_be_loss(const Graph& graph, const Value& value) {
  const Shape& shape = value.type.shape;
  return is_floating(value.type.dtype) && num_elements(shape) == 1 &&
         (shape.empty() || (shape.size() == 1 && micro_batch_size(graph) > 1));
}

void warn_of_other_losses(const Graph& graph, const Value& chosen) {
  std::string others;
  for (const ValueId id : graph.outputs()) {
    const Value& value = graph.value(id);
    if (value.name != chosen.name && may_be_loss(graph, value)) {
      others += concat(others.empty() ? "'" : ", '", value.name, "'");
    }
  }
  if (!others.empty()) {
    log_warning("output '",
                chosen.name,
                "' is taken for the loss, the first of several float scalars; --loss output:NAME "
                "chooses another (",
                others,
                ")");
  }
}

// The node that computes the output, behind those that only move its elements.
const Node* maker_of(const Graph& graph, const Value& output) {
  NodeId producer = output.producer;
  while (producer != kNoNode) {
    const Node& node = graph.node(producer);
    const std::string& type = node.op_type;
    if (type != "Identity" && type != "Reshape" && type != "Transpose" && type != "Cast") {
      return &node;
    }
    producer = graph.value(node.inputs[0]).producer;
  }
  return nullptr;
}

// Losses that apply a function of their own to scores, on an output that has one already; and nll,
// which applies none, on an output without. What else makes an output is not judged.
void warn_of_activation(const Graph& graph, const Value& output, const std::string& kind) {
  const Node* made_by = maker_of(graph, output);
  if (made_by == nullptr) {
    return;
  }
  const std::string& type = made_by->op_type;
  if ((kind == "softmax_cross_entropy" && type == "Softmax") ||
      (kind == "bce_with_logits" && type == "Sigmoid")) {
    log_warning("output '",
                output.name,
                "' is made by a ",
                type,
                ", and loss ",
                kind,
                " applies one of its own: export the model without it, with the scores '",
                graph.value(made_by->inputs[0]).name,
                "' for an output, or take another loss");
  }
  static const std::set<std::string> kNoLogarithms = {
      "MatMul", "Gemm", "Add", "Conv", "Einsum", "Relu", "Tanh", "Sigmoid", "Softmax"};
  if (kind == "nll" && kNoLogarithms.count(type) != 0) {
    log_warning("output '",
                output.name,
                "' is made by node '",
                made_by->name,
                "' (",
                type,
                "), and loss nll reads logarithms of probabilities, as LogSoftmax makes them: for "
                "scores take --loss softmax_cross_entropy");
  }
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
    for (const ValueId id : graph.outputs()) {
      if (may_be_loss(graph, graph.value(id))) {
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

// Where the classes are without labels to tell: on axis 1, or last in a language model and where
// the samples do not come first. Of an output of two dims or more.
int unlabelled_class_axis(const Graph& graph, const Value& output, const LossSpec& spec) {
  LossSpec last = spec;
  last.next_token = true;  // which has its classes there
  const bool is_last = is_language_model(graph, output) || spec.place.axis > 0;
  return is_last ? class_axis(output.type.shape, last) : 1;
}

// The shape of labels that are drawn, batch first.
Shape drawn_labels(const Graph& graph, const Value& output, const LossSpec& spec, bool classes) {
  ItemsShape items{output.type.shape, spec.place};
  if (classes && items.shape.size() >= 2) {
    items = without_classes(items.shape, spec.place, unlabelled_class_axis(graph, output, spec));
  }
  const int64_t batch = micro_batch_size(graph);
  Shape labels = sample_of(split_samples(items.shape, items.place, batch));
  labels.insert(labels.begin(), batch);
  return num_elements(labels) == num_elements(items.shape) ? labels : items.shape;
}

// Labels lie as the output does: where its samples do not come first, an array's, which do, are
// moved there.
void place_labels(const Value& output, int64_t batch, bool classes, LossSpec& spec) {
  ItemsShape items{output.type.shape, spec.place};
  if (classes) {
    const int axis = class_axis(output.type.shape, spec);
    if (axis < 0) {
      return;
    }
    items = without_classes(output.type.shape, spec.place, axis);
  }
  SampleShapeAt at = split_samples(items.shape, items.place, batch);
  if (at.batch_axis > 0 && num_elements(at.shape) == num_elements(spec.labels_shape)) {
    spec.labels_shape = std::move(at.shape);
    spec.labels_batch_axis = at.batch_axis;
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
    const bool classes =
        shape.size() >= 2 &&
        shape[static_cast<size_t>(unlabelled_class_axis(graph, output, spec))] >= 2;
    spec.kind = classes ? "softmax_cross_entropy" : "mse";
  }
}

}  // namespace

LossSpec resolve_loss(const Graph& forward,
                      const LossSpec& wanted,
                      const TensorType* labels,
                      const GraphAtBatch& at_batch) {
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
      (spec.kind == "auto" && (wanted.output.empty() || output.type.shape.empty()) &&
       may_be_loss(forward, output))) {
    if (spec.kind == "auto" && wanted.output.empty()) {
      warn_of_other_losses(forward, output);
    }
    spec.kind = "output";
    return spec;
  }
  const Value* input = label_input(forward, spec.labels);
  if (input != nullptr) {
    spec.labels = input->name;
    labels = &input->type;
  }
  spec.place = find_sample_place(forward, output, at_batch);
  if (spec.kind == "auto") {
    infer_kind(forward, output, labels, spec);
  } else if (spec.kind == "softmax_cross_entropy" && labels == nullptr) {
    spec.next_token = is_language_model(forward, output);
  }
  const bool classes = spec.kind == "softmax_cross_entropy" || spec.kind == "nll";
  warn_of_activation(forward, output, spec.kind);
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
    spec.labels_shape = drawn_labels(forward, output, spec, classes);
  }
  if (input == nullptr) {
    place_labels(output, micro_batch_size(forward), classes, spec);
  } else {
    spec.labels_batch_axis = std::max(0, input->batch_axis);
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
