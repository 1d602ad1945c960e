// A loss is read as a sum of terms, each a number times what some node makes of the samples: their
// sum, their mean, or nothing (a regulariser).
#include "graph/scalar_loss.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

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

enum class OfSamples : uint8_t { kNothing, kSum, kMean, kOther };

struct Term {
  OfSamples kind = OfSamples::kOther;
  double factor = 1;
  bool scaled = false;  // by numbers, which the number of samples may be among
};

class TermFinder {
 public:
  TermFinder(const Graph& graph, ValueId loss) : graph_(graph), course_(follow_samples(graph)) {
    if (!course_.depends.empty()) {
      find(loss, {});
    }
  }

  const SampleCourse& course() const { return course_; }
  // Empty where the graph has a single sample.
  const std::vector<Term>& terms() const { return terms_; }

 private:
  void find(ValueId id, Term term) {
    const Node* node = maker_of(graph_, id);
    if (node == nullptr) {
      // A number that is added may be one of samples too.
      scale(term, number(id));
      add(term, course_.depends[static_cast<size_t>(id)] ? OfSamples::kOther : OfSamples::kNothing);
      return;
    }
    const std::string& type = node->op_type;
    const ValueId first = node->inputs.at(0);
    if (type == "Neg") {
      find(first, {.factor = -term.factor, .scaled = term.scaled});
    } else if (type == "Add" || type == "Sub") {
      find(first, term);
      find(node->inputs[1],
           {.factor = type == "Sub" ? -term.factor : term.factor, .scaled = term.scaled});
    } else if (type == "Mul" || type == "Div") {
      find_product(*node, term);
    } else {
      find_reduction(*node, term);
    }
  }

  void find_product(const Node& node, Term term) {
    const bool divides = node.op_type == "Div";
    ValueId rest = node.inputs[0];
    ValueId by = node.inputs[1];
    if (!divides && !is_number(by)) {
      std::swap(rest, by);
    }
    if (is_number(by)) {
      const std::optional<double> value = number(by);
      scale(term, value && divides ? 1 / *value : value);
      find(rest, term);
    } else {
      add_output(node, term, OfSamples::kOther);
    }
  }

  void find_reduction(const Node& node, const Term& term) {
    const std::string& type = node.op_type;
    const ValueId first = node.inputs.at(0);
    const bool linear = type == "ReduceSum" || type == "ReduceMean";
    const bool of_samples = !course_.reduced[static_cast<size_t>(first)];
    const bool summed = course_.summed[static_cast<size_t>(node.outputs[0])];
    if (linear && !of_samples) {
      find(first, term);  // over features, of what was reduced over the samples
    } else if (type == "ReduceMean") {
      add_output(node, term, OfSamples::kMean);
    } else if (sum_behind(graph_, node.outputs[0]) != kNoValue && of_samples) {
      add_output(node, term, OfSamples::kSum);
    } else if (summed && (type == "ReduceSumSquare" || type == "ReduceL1" || type == "MatMul" ||
                          type == "Gemm" || type == "Einsum")) {
      add_output(node, term, OfSamples::kSum);
    } else {
      add_output(node, term, OfSamples::kOther);
    }
  }

  void add_output(const Node& node, const Term& term, OfSamples kind) {
    const bool depends = course_.depends[static_cast<size_t>(node.outputs[0])];
    add(term, depends ? kind : OfSamples::kNothing);
  }

  void add(Term term, OfSamples kind) {
    term.kind = kind;
    terms_.push_back(term);
  }

  // A scalar of the model: of known value or trained, in which case it is none of samples.
  bool is_number(ValueId id) const {
    const Value& value = graph_.value(id);
    return num_elements(value.type.shape) == 1 &&
           (value.kind == ValueKind::kParameter || value.kind == ValueKind::kConstant);
  }

  std::optional<double> number(ValueId id) const {
    const Value& value = graph_.value(id);
    if (value.kind != ValueKind::kConstant || num_elements(value.type.shape) != 1) {
      return std::nullopt;
    }
    return (value.constant.defined() ? value.constant : value.source.load()).to_double()[0];
  }

  static void scale(Term& term, std::optional<double> by) {
    if (by) {
      term.factor *= *by;
      term.scaled = true;
    }
  }

  const Graph& graph_;
  const SampleCourse course_;
  std::vector<Term> terms_;
};

bool is_near(double a, double b) {
  return std::abs(a - b) <= 0.01 * std::abs(b);  // 16-bit constants are rounded
}

// What a term is in the end: a sum that is divided by the number of samples is a mean.
OfSamples settle(const Term& term, const Term* doubled) {
  if (!term.scaled) {
    return term.kind;
  }
  if (doubled == nullptr) {
    return OfSamples::kOther;
  }
  if (is_near(doubled->factor, term.factor)) {
    return term.kind;
  }
  if (term.kind == OfSamples::kSum && is_near(2 * doubled->factor, term.factor)) {
    return OfSamples::kMean;
  }
  if (term.kind == OfSamples::kMean && is_near(doubled->factor, 2 * term.factor)) {
    return OfSamples::kSum;
  }
  return OfSamples::kOther;
}

// Sums add up to a sum, means and what depends on no sample to a mean.
OfSamples settle(const std::vector<Term>& terms, const std::vector<Term>* doubled) {
  if (doubled != nullptr && doubled->size() != terms.size()) {
    doubled = nullptr;
  }
  bool any_sum = false, any_mean = false;
  for (size_t i = 0; i < terms.size(); ++i) {
    const OfSamples kind = settle(terms[i], doubled == nullptr ? nullptr : &(*doubled)[i]);
    if (kind == OfSamples::kOther) {
      return OfSamples::kOther;
    }
    any_sum = any_sum || kind == OfSamples::kSum;
    any_mean = any_mean || kind != OfSamples::kSum;
  }
  return any_sum && any_mean ? OfSamples::kOther : any_sum ? OfSamples::kSum : OfSamples::kMean;
}

// A mean of items, taken apart into sum and count where the loss is built.
bool is_mean_loss(const Graph& graph, const SampleCourse& course, ValueId loss) {
  const Node* made_by = maker_of(graph, loss);
  if (made_by == nullptr || made_by->op_type != "MeanLoss") {
    return false;
  }
  made_by = maker_of(graph, made_by->inputs[0]);
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
  const TermFinder found(graph, loss);
  const SampleCourse& course = found.course();
  const std::string& loss_name = graph.value(loss).name;
  std::optional<TermFinder> at_double;
  if (doubled != nullptr && doubled->find_value(loss_name)) {
    at_double.emplace(*doubled, *doubled->find_value(loss_name));
  }
  const OfSamples kind = is_mean_loss(graph, course, loss) ? OfSamples::kMean
                         : found.terms().empty()
                             ? of_form(graph, loss)
                             : settle(found.terms(), at_double ? &at_double->terms() : nullptr);
  ScalarLoss result;
  result.sums_samples = kind == OfSamples::kSum;
  const std::string name = concat("loss output '", loss_name, "'");
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
