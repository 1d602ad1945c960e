#include "graph/scalar_loss.h"

#include "graph/base/error.h"
#include "graph/passes/sample_rows.h"

namespace trainrt {

namespace {

// The node that computes the value, behind those that only change its form.
const Node* maker_of(const Graph& graph, ValueId id) {
  while (true) {
    const NodeId producer = graph.value(id).producer;
    if (producer == kNoNode) {
      return nullptr;
    }
    const Node& node = graph.node(producer);
    if (node.op_type != "Identity" && node.op_type != "Reshape" && node.op_type != "Cast") {
      return &node;
    }
    id = node.inputs[0];
  }
}

}  // namespace

ValueId sum_behind(const Graph& graph, ValueId scalar) {
  const Node* made_by = maker_of(graph, scalar);
  const bool is_sum = made_by != nullptr && (made_by->op_type == "SoftmaxCrossEntropyLoss" ||
                                             made_by->op_type == "NegativeLogLikelihoodLoss" ||
                                             made_by->op_type == "ReduceSum");
  return is_sum ? made_by->outputs[0] : kNoValue;
}

ScalarLoss describe_scalar_loss(const Graph& graph, ValueId loss) {
  const SampleCourse course = follow_samples(graph);
  const Node* made_by = maker_of(graph, loss);
  const bool is_mean =
      made_by != nullptr && (made_by->op_type == "MeanLoss" || made_by->op_type == "ReduceMean");
  if (is_mean && made_by->op_type == "MeanLoss") {
    made_by = maker_of(graph, made_by->inputs[0]);
  }
  const bool of_samples =
      made_by != nullptr &&
      (course.reduced.empty() || !course.reduced[static_cast<size_t>(made_by->inputs[0])]);
  ScalarLoss result;
  result.sums_samples = of_samples && sum_behind(graph, loss) != kNoValue;
  const std::string name = concat("loss output '", graph.value(loss).name, "'");
  if (result.sums_samples) {
    // Weighting a sum would make it depend on the size of micro-batches.
    result.warning = concat(name, " is a sum: it is divided by the number of samples of the step");
  } else if (!is_mean || !of_samples) {
    result.warning = concat(name,
                            " is no mean over samples that could be taken apart into sum and "
                            "count: micro-batches are weighted by their numbers of samples");
  }
  const std::string& meeting = course.mixed.empty() ? course.met : course.mixed;
  if (!meeting.empty()) {
    result.warning =
        concat(result.warning.empty() ? name : result.warning,
               result.warning.empty() ? ": samples meet in node '" : "; and samples meet in node '",
               meeting,
               "', so that it differs where a step is cut into micro-batches or over "
               "data ranks (--micro-batch-size, --dp)");
  }
  return result;
}

}  // namespace trainrt
