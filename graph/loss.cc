// Losses in terms of ops/softmax_cross_entropy, nll_loss, element_loss and item_count.
//
// What counts items runs in Region::kCount, before any forward, and therefore on labels alone: the
// few nodes that prepare labels (cast, reshape, shift) are emitted once per region.
#include "graph/loss.h"

#include <algorithm>
#include <map>

#include "graph/graph_builder.h"
#include "graph/label_place.h"
#include "graph/scalar_loss.h"

namespace trainrt {

int64_t micro_batch_size(const Graph& graph) {
  for (const ValueId id : graph.values_of_kind(ValueKind::kInput)) {
    const Value& value = graph.value(id);
    if (value.batch_axis >= 0) {
      return value.type.shape.at(static_cast<size_t>(value.batch_axis));
    }
  }
  return 1;
}

namespace {

class LossBuilder : public GraphBuilder {
 public:
  LossBuilder(Graph& graph, const LossSpec& spec) : GraphBuilder(graph), spec_(spec) {}

  // A scalar of the graph: MeanLoss is looked through, up to nodes that only change its shape.
  LossValues from_scalar(ValueId loss, bool count_correct = false);

  LossValues build(bool count_correct) {
    const ValueId output = find_output();
    if (spec_.kind == "output") {
      return from_scalar(output, count_correct);
    }
    if (spec_.kind == "softmax_cross_entropy" || spec_.kind == "nll") {
      return from_classes(output, count_correct);
    }
    return from_elements(output);
  }

 private:
  ValueId find_output() const {
    std::vector<std::string> names;
    for (const ValueId id : graph_.outputs()) {
      names.push_back(graph_.value(id).name);
      if (names.back() == spec_.output) {
        return id;
      }
    }
    std::string list;
    for (const std::string& name : names) {
      list += (list.empty() ? "'" : ", '") + name + "'";
    }
    TRAINRT_FAIL(kInvalidArgument,
                 "loss '",
                 spec_.kind,
                 "' reads output '",
                 spec_.output,
                 "', which the model lacks",
                 did_you_mean(spec_.output, names),
                 "; it has ",
                 list);
  }

  void run_in(Region region) {
    set_region(region);
    set_name_prefix(region == Region::kCount ? "trainrt.count/" : "trainrt.loss/");
  }

  // ---- labels

  ValueId labels_input() {
    if (const std::optional<ValueId> existing = graph_.find_value(spec_.labels)) {
      TRAINRT_REQUIRE(graph_.value(*existing).kind == ValueKind::kInput,
                      kInvalidArgument,
                      "--labels names '",
                      spec_.labels,
                      "', which is a ",
                      value_kind_name(graph_.value(*existing).kind),
                      ", wanted a graph input");
      return *existing;
    }
    return graph_.add_input(spec_.labels,
                            {spec_.labels_dtype, spec_.labels_shape},
                            spec_.labels_shape.empty() ? -1 : spec_.labels_batch_axis);
  }

  // Next-token labels: the token ids one position later.
  ValueId shifted(ValueId ids, int batch_axis) {
    return op("ShiftLabels",
              {ids},
              {{"axis", int64_t{batch_axis == 1 ? 0 : 1}}, {"ignore_index", spec_.ignore_index}},
              "shift_labels");
  }

  // The integer input that goes on where the output predicts: of several (masks, positions, the
  // text of an encoder) the one that looks up a row per class, and of those the decoder's.
  ValueId token_input(const Shape& wanted, int64_t classes) const {
    std::vector<ValueId> inputs;
    for (const ValueId id : graph_.values_of_kind(ValueKind::kInput)) {
      const Value& value = graph_.value(id);
      if (is_integer(value.type.dtype) && value.type.shape == wanted) {
        inputs.push_back(id);
      }
    }
    TRAINRT_REQUIRE(!inputs.empty(),
                    kInvalidArgument,
                    "next-token labels need an integer input of shape ",
                    shape_string(wanted),
                    ", which the model lacks; give labels with --labels");
    const auto prefer = [&](auto&& fits) {
      std::vector<ValueId> fitting;
      std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(fitting), fits);
      inputs = fitting.empty() ? inputs : fitting;
    };
    if (inputs.size() > 1) {
      prefer([&](ValueId id) { return looks_up_rows(id, classes); });
    }
    if (inputs.size() > 1) {
      prefer([&](ValueId id) {
        const std::string& name = graph_.value(id).name;
        return name.find("dec") != std::string::npos || name.find("tgt") != std::string::npos ||
               name.find("target") != std::string::npos;
      });
    }
    TRAINRT_REQUIRE(inputs.size() == 1,
                    kInvalidArgument,
                    "inputs '",
                    graph_.value(inputs[0]).name,
                    "' and '",
                    graph_.value(inputs[1]).name,
                    "' may both be the text that output '",
                    spec_.output,
                    "' continues; give the labels as an array, named by --labels");
    return inputs[0];
  }

  // Whether the values, perhaps converted or reshaped, are the indices into a table of `rows`.
  bool looks_up_rows(ValueId id, int64_t rows) const {
    for (const Node& node : graph_.nodes()) {
      if (node.inputs.empty()) {
        continue;
      }
      const bool moves = node.op_type == "Cast" || node.op_type == "Reshape" ||
                         node.op_type == "Transpose" || node.op_type == "Slice";
      if (moves && node.inputs[0] == id && looks_up_rows(node.outputs[0], rows)) {
        return true;
      }
      if (node.op_type == "Gather" && node.inputs.size() > 1 && node.inputs[1] == id &&
          node.attributes.get_int("axis", 0) == 0 && !shape(node.inputs[0]).empty() &&
          shape(node.inputs[0])[0] == rows) {
        return true;
      }
    }
    return false;
  }

  ValueId as_label_dtype(ValueId id) {
    TRAINRT_REQUIRE(is_integer(dtype(id)),
                    kInvalidArgument,
                    "labels '",
                    graph_.value(id).name,
                    "' are ",
                    dtype_name(dtype(id)),
                    "; loss ",
                    spec_.kind,
                    " wants integer classes (mse, l1 and bce_with_logits take float targets)");
    return dtype(id) == DType::kInt32 ? id : cast(id, DType::kInt64);
  }

  // As `wanted`, whose samples lie at `place`; those of `labels` lie along `batch_axis`.
  ValueId with_shape(ValueId labels,
                     int batch_axis,
                     const Shape& wanted,
                     const SamplePlace& place) {
    TRAINRT_REQUIRE(num_elements(shape(labels)) == num_elements(wanted),
                    kInvalidArgument,
                    "labels '",
                    graph_.value(labels).name,
                    "' have shape ",
                    shape_string(shape(labels)),
                    "; loss ",
                    spec_.kind,
                    " on output '",
                    spec_.output,
                    "' wants ",
                    shape_string(wanted));
    return reshape(batch_axis < 0 ? labels : move_samples(labels, batch_axis, wanted, place),
                   wanted);
  }

  // `labels` with their elements in the order of `wanted`.
  ValueId move_samples(ValueId labels,
                       int batch_axis,
                       const Shape& wanted,
                       const SamplePlace& place) {
    const Shape from = shape(labels);
    const int64_t batch = from[static_cast<size_t>(batch_axis)];
    const SampleShapeAt to = split_samples(wanted, place, batch);
    if (dims_product(from, 0, batch_axis) == dims_product(to.shape, 0, to.batch_axis)) {
      return labels;
    }
    Shape batch_first = sample_of(to);
    batch_first.insert(batch_first.begin(), batch);
    return move_axis(
        reshape(move_axis(labels, batch_axis, 0), batch_first), /*from=*/0, to.batch_axis);
  }

  ValueId move_axis(ValueId id, int from, int to) {
    std::vector<int64_t> permutation;
    for (int d = 0; d < ndim(id); ++d) {
      if (d != from) {
        permutation.push_back(d);
      }
    }
    permutation.insert(permutation.begin() + to, from);
    return from == to ? id : transpose(id, permutation);
  }

  ValueId class_labels(const ItemsShape& items, int64_t classes) {
    const ValueId source = spec_.next_token ? token_input(items.shape, classes) : labels_input();
    const int batch_axis = graph_.value(source).batch_axis;
    const ValueId labels = as_label_dtype(source);
    return with_shape(spec_.next_token ? shifted(labels, batch_axis) : labels,
                      batch_axis,
                      items.shape,
                      items.place);
  }

  // ---- classes

  ValueId row_max(ValueId scores, int axis) {
    return op("ReduceMax",
              {scores},
              {{"axes", std::vector<int64_t>{axis}}, {"keepdims", int64_t{0}}},
              "row_max");
  }

  ValueId count_right(
      ValueId scores, ValueId labels, int axis, ValueId maxima, const Attributes& ignore) {
    const ValueId best =
        op("FirstMaxIndex", {scores, maxima}, {{"axis", int64_t{axis}}}, "prediction");
    return op("CorrectCount", {best, labels}, ignore, "correct");
  }

  LossValues from_classes(ValueId scores, bool count_correct) {
    const int axis = class_axis(shape(scores), spec_);
    TRAINRT_REQUIRE(axis >= 0,
                    kInvalidArgument,
                    "output '",
                    spec_.output,
                    "' has shape ",
                    shape_string(shape(scores)),
                    "; loss ",
                    spec_.kind,
                    " wants [batch, ..., classes]");
    const int64_t classes = shape(scores)[static_cast<size_t>(axis)];
    const ItemsShape items = without_classes(shape(scores), spec_.place, axis);
    LossValues result;
    run_in(Region::kCount);
    result.item_count = op("ItemCount",
                           {class_labels(items, classes)},
                           {{"ignore_index", spec_.ignore_index}, {"num_classes", classes}},
                           "items");
    run_in(Region::kForward);
    const ValueId labels = class_labels(items, classes);
    const Attributes attributes = {{"axis", int64_t{axis}}, {"ignore_index", spec_.ignore_index}};
    const Attributes along = {{"axis", int64_t{axis}}};
    ValueId maxima = kNoValue;
    if (spec_.kind == "nll") {
      result.loss_sum = op("NegativeLogLikelihoodLoss", {scores, labels}, attributes, "nll");
    } else {
      maxima = row_max(scores, axis);
      const ValueId sums = op("SumExp", {scores, maxima}, along, "sum_exp");
      result.loss_sum = op(
          "SoftmaxCrossEntropyLoss", {scores, labels, maxima, sums}, attributes, "cross_entropy");
    }
    if (count_correct) {
      maxima = maxima == kNoValue ? row_max(scores, axis) : maxima;
      result.correct =
          count_right(scores, labels, axis, maxima, {{"ignore_index", spec_.ignore_index}});
    }
    return result;
  }

  // ---- elements

  LossValues from_elements(ValueId output) {
    static const std::map<std::string, std::string> kinds = {
        {"mse", "squared"}, {"l1", "absolute"}, {"bce_with_logits", "bce_with_logits"}};
    const auto kind = kinds.find(spec_.kind);
    TRAINRT_CHECK(kind != kinds.end(), "loss '", spec_.kind, "' is not resolved");
    const auto targets = [&] {
      const ValueId labels = labels_input();
      const int batch_axis = graph_.value(labels).batch_axis;
      return with_shape(cast(labels, dtype(output)), batch_axis, shape(output), spec_.place);
    };
    LossValues result;
    run_in(Region::kCount);
    result.item_count = op("ItemCount", {targets()}, {}, "items");
    run_in(Region::kForward);
    result.loss_sum = op("ElementLoss", {output, targets()}, {{"kind", kind->second}}, spec_.kind);
    return result;
  }

  // ---- a scalar of the graph

  ValueId correct_of(ValueId loss_sum);

  const Node* producer(ValueId id) const {
    const NodeId node = graph_.value(id).producer;
    return node == kNoNode ? nullptr : &graph_.node(node);
  }

  // Emits again, in Region::kCount, what `id` is computed from.
  ValueId recompute(ValueId id, std::map<ValueId, ValueId>& done) {
    const Node* made_by = id == kNoValue ? nullptr : producer(id);
    if (made_by == nullptr) {
      return id;
    }
    if (done.count(id) == 0) {
      const Node copy = *made_by;
      std::vector<ValueId> inputs;
      for (const ValueId input : copy.inputs) {
        inputs.push_back(recompute(input, done));
      }
      const std::vector<ValueId> outputs = node(copy.op_type, inputs, copy.attributes, copy.name);
      for (size_t i = 0; i < copy.outputs.size(); ++i) {
        done[copy.outputs[i]] = outputs[i];
      }
    }
    return done.at(id);
  }

  const LossSpec& spec_;
};

// Correctly classified items of a classification loss in the graph, else kNoValue. Where classes
// are weighted too: the count that divides the loss is then no number of items to divide these by.
ValueId LossBuilder::correct_of(ValueId loss_sum) {
  const Node* made_by = producer(loss_sum);
  if (made_by == nullptr || (made_by->op_type != "SoftmaxCrossEntropyLoss" &&
                             made_by->op_type != "NegativeLogLikelihoodLoss")) {
    return kNoValue;
  }
  const size_t weights = made_by->op_type == "SoftmaxCrossEntropyLoss" ? 4 : 2;
  if (made_by->inputs.size() > weights && made_by->inputs[weights] != kNoValue) {
    return kNoValue;
  }
  const ValueId scores = made_by->inputs[0];
  const ValueId labels = made_by->inputs[1];
  Attributes ignore;
  if (made_by->attributes.has("ignore_index")) {
    ignore.set("ignore_index", made_by->attributes.get_int("ignore_index"));
  }
  const int axis = normalize_axis(made_by->attributes.get_int("axis", 1), ndim(scores));
  run_in(Region::kForward);
  return count_right(scores, labels, axis, row_max(scores, axis), ignore);
}

LossValues LossBuilder::from_scalar(ValueId loss, bool count_correct) {
  TRAINRT_REQUIRE(is_floating(dtype(loss)) && num_elements(shape(loss)) == 1,
                  kInvalidArgument,
                  "loss output '",
                  graph_.value(loss).name,
                  "' is ",
                  dtype_name(dtype(loss)),
                  shape_string(shape(loss)),
                  ", wanted a float scalar");
  const bool sums_samples =
      spec_.sums_samples ? *spec_.sums_samples : describe_scalar_loss(graph_, loss).sums_samples;
  const Node* made_by = producer(loss);
  while (made_by != nullptr && (made_by->op_type == "Identity" || made_by->op_type == "Reshape")) {
    loss = made_by->inputs[0];
    made_by = producer(loss);
  }
  LossValues result;
  if (made_by != nullptr && made_by->op_type == "MeanLoss") {
    result.loss_sum = made_by->inputs[0];
    const ValueId count = made_by->inputs[1];
    run_in(Region::kCount);
    std::map<ValueId, ValueId> done;
    result.item_count = recompute(count, done);
    if (producer(result.item_count) == nullptr) {
      // Labels that are made of shapes alone have been folded, and their count with them; the
      // runtime reads what Region::kCount computes.
      result.item_count = op("Identity", {result.item_count}, {}, "items");
    }
    result.correct = count_correct ? correct_of(result.loss_sum) : kNoValue;
    return result;
  }
  const ValueId sum = sums_samples ? sum_behind(graph_, loss) : kNoValue;
  const double batch = static_cast<double>(micro_batch_size(graph_));
  run_in(Region::kCount);
  result.item_count = fill(batch, {DType::kFloat64, {}});
  run_in(Region::kForward);
  const ValueId scalar = cast(reshape(sum == kNoValue ? loss : sum, {}), DType::kFloat64);
  result.loss_sum = sums_samples ? scalar : mul(scalar, batch);
  result.correct = count_correct ? correct_of(result.loss_sum) : kNoValue;
  return result;
}

}  // namespace

LossValues loss_of_scalar(Graph& graph, ValueId scalar, bool sums_samples) {
  LossSpec spec;
  spec.sums_samples = sums_samples;
  return LossBuilder(graph, spec).from_scalar(scalar);
}

LossValues build_loss(Graph& graph, const LossSpec& spec, bool count_correct) {
  TRAINRT_CHECK(spec.kind != "auto", "the loss is not resolved");
  return LossBuilder(graph, spec).build(count_correct);
}

}  // namespace trainrt
