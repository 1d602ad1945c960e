// ONNX's classification losses in our form. ONNX fuses loss and reduction; here a loss is a float64
// sum, an ItemCount beside it gives the divisor, and MeanLoss divides: so that a training graph can
// take sum and count apart again and normalise once over the whole step.
#include "ops/cross_entropy.h"

namespace trainrt {

namespace {

ValueId mean_of(UpgradeContext& u, ValueId sum, const Attributes& attributes) {
  std::vector<ValueId> counted = {u.input(1)};
  if (u.has_input(2)) {
    counted.push_back(u.input(2));
  }
  Attributes count_attributes;
  if (u.ndim(u.input(0)) >= 2) {
    count_attributes.set("num_classes", u.shape(u.input(0))[1]);
  }
  if (attributes.has("ignore_index")) {
    count_attributes.set("ignore_index", attributes.get_int("ignore_index"));
  }
  const ValueId count = u.op("ItemCount", counted, count_attributes, u.node_name() + "/count");
  return u.op("MeanLoss",
              {sum, count},
              {{"result", std::string(dtype_name(u.dtype(u.input(0))))}},
              u.node_name() + "/mean");
}

// A class's weight is found by its number.
void require_class_weights(UpgradeContext& u) {
  const Shape& scores = u.shape(u.input(0));
  if (u.has_input(2) && scores.size() >= 2 && u.shape(u.input(2)) != Shape{scores[1]}) {
    u.fail(concat("the weights are ",
                  shape_string(u.shape(u.input(2))),
                  ", wanted one for each class of ",
                  shape_string(scores)));
  }
}

// Emits `op_type` on `inputs`, then what the ONNX attribute `reduction` asks for.
void emit_loss(UpgradeContext& u, const std::string& op_type, const std::vector<ValueId>& inputs) {
  require_class_weights(u);
  const std::string reduction = u.attributes().get_string("reduction", "mean");
  if (reduction != "mean" && reduction != "sum" && reduction != "none") {
    u.fail(concat("reduction '", reduction, "', wanted mean, sum or none"));
  }
  Attributes attributes = {{"axis", int64_t{1}},
                           {"reduction", std::string(reduction == "none" ? "none" : "sum")}};
  if (u.attributes().has("ignore_index")) {
    attributes.set("ignore_index", u.attributes().get_int("ignore_index"));
  }
  if (reduction != "mean" && u.ndim(u.input(0)) >= 2) {  // ItemCount sees those of a mean
    attributes.set("num_classes", u.shape(u.input(0))[1]);
  }
  const ValueId loss = u.emit(op_type, inputs, attributes)[0];
  if (reduction == "none") {
    u.set_output(0, loss);
  } else if (reduction == "sum") {
    u.set_output(0, u.cast(loss, u.dtype(u.input(0))));
  } else {
    u.set_output(0, mean_of(u, loss, attributes));
  }
}

}  // namespace

void upgrade_softmax_cross_entropy(UpgradeContext& u) {
  const ValueId scores = u.input(0);
  const std::string name = u.node_name();
  const ValueId row_max = u.op("ReduceMax",
                               {scores},
                               {{"axes", std::vector<int64_t>{1}}, {"keepdims", int64_t{0}}},
                               name + "/row_max");
  const ValueId sum_exp =
      u.op("SumExp", {scores, row_max}, {{"axis", int64_t{1}}}, name + "/sum_exp");
  std::vector<ValueId> inputs = {scores, u.input(1), row_max, sum_exp};
  if (u.has_input(2)) {
    inputs.push_back(u.input(2));
  }
  emit_loss(u, "SoftmaxCrossEntropyLoss", inputs);
  if (u.wants_output(1)) {
    u.set_output(1, u.op("LogSoftmax", {scores}, {{"axis", int64_t{1}}}, name + "/log_prob"));
  }
}

void upgrade_negative_log_likelihood(UpgradeContext& u) {
  std::vector<ValueId> inputs = {u.input(0), u.input(1)};
  if (u.has_input(2)) {
    inputs.push_back(u.input(2));
  }
  emit_loss(u, "NegativeLogLikelihoodLoss", inputs);
}

}  // namespace trainrt
