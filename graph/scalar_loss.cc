#include "graph/scalar_loss.h"

#include "graph/base/error.h"
#include "graph/passes/sample_rows.h"
#include "graph/sample_growth.h"

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

// A mean of items, taken apart into sum and count where the loss is built.
bool is_mean_loss(const Graph& graph,
                  const SampleCourse& course,
                  ValueId loss,
                  const Graph* doubled) {
  const Node* made_by = maker_of(graph, loss);
  if (made_by == nullptr || made_by->op_type != "MeanLoss") {
    return false;
  }
  const ValueId sum = made_by->inputs[0];
  if (!course.depends.empty() && degree_in_samples(graph, course, sum, doubled).value_or(1) != 1) {
    return false;  // its items have been divided by their number before, say
  }
  made_by = maker_of(graph, sum);
  return made_by != nullptr &&
         (course.reduced.empty() || !course.reduced[static_cast<size_t>(made_by->inputs[0])]);
}

// With a single sample there is nothing to follow: the form tells.
OfSamples of_form(const Graph& graph, ValueId loss) {
  const Node* made_by = maker_of(graph, loss);
  return sum_behind(graph, loss) != kNoValue                      ? OfSamples::kSum
         : made_by != nullptr && made_by->op_type == "ReduceMean" ? OfSamples::kMean
                                                                  : OfSamples::kOther;
}

}  // namespace

ValueId sum_behind(const Graph& graph, ValueId scalar) {
  const Node* made_by = maker_of(graph, scalar);
  const bool is_sum = made_by != nullptr && (made_by->op_type == "SoftmaxCrossEntropyLoss" ||
                                             made_by->op_type == "NegativeLogLikelihoodLoss" ||
                                             made_by->op_type == "ReduceSum");
  return is_sum ? made_by->outputs[0] : kNoValue;
}

ScalarLoss describe_scalar_loss(const Graph& graph, ValueId loss, const Graph* doubled) {
  const SampleCourse course = follow_samples(graph);
  const OfSamples kind = is_mean_loss(graph, course, loss, doubled) ? OfSamples::kMean
                         : course.depends.empty()                   ? of_form(graph, loss)
                                                  : of_samples(graph, course, loss, doubled);
  ScalarLoss result;
  result.sums_samples = kind == OfSamples::kSum;
  const std::string name = concat("loss output '", graph.value(loss).name, "'");
  if (result.sums_samples) {
    // Weighting a sum would make it depend on the size of micro-batches.
    result.warning = concat(name, " is a sum: it is divided by the number of samples of the step");
  } else if (kind == OfSamples::kOther) {
    result.warning =
        concat(name,
               " is neither a sum nor a mean over samples that could be told as one: micro-batches "
               "are weighted by their numbers of samples, so that it depends on how a step is cut "
               "into micro-batches and over data ranks; a mean over samples (and terms of weights "
               "alone) does not, nor does a step that is not cut (--micro-batch-size as large as "
               "the batch, --dp 1)");
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
