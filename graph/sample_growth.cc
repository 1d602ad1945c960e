// Every value is taken to grow as N^degree with the number N of samples, if each is there N times:
// what belongs to one sample has degree 0, a sum over samples 1, their number 1, and a division by
// it takes 1 away. The numbers of samples are constants by now; those of the graph at twice as many
// samples tell them from others, and their shapes what is as long as the batch without being made
// of samples. Only what is made of sums and means by linear operators is a sum or a mean itself:
// the root of a mean has degree 0, too, but micro-batches' roots do not add up.
#include "graph/sample_growth.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "graph/base/error.h"
#include "graph/fused_elementwise.h"

namespace trainrt {

namespace {

struct Growth {
  bool known = true;
  int degree = 0;
  bool zero = false;     // nothing but zeros, which are of any degree
  bool reduced = false;  // over the samples
  bool linear = true;    // in what was reduced
  bool scaled = false;   // by numbers, which that of samples may be among
};

Growth unknown() {
  return {.known = false, .linear = false};
}

bool is_near(double a, double b) {
  return std::abs(a - b) <= 0.01 * std::abs(b);  // 16-bit constants are rounded
}

// The power of 2 that `a` is multiplied by to become `b`.
std::optional<int> octaves(double a, double b) {
  if (a == 0 || b / a <= 0) {
    return std::nullopt;
  }
  const int power = static_cast<int>(std::lround(std::log2(b / a)));
  return is_near(b, a * std::exp2(power)) ? std::optional<int>(power) : std::nullopt;
}

Tensor contents(const Value& value) {
  return value.constant.defined() ? value.constant : value.source.load();
}

// Of a constant and of the same at twice as many samples, which may have twice as many rows: then
// the first of them are compared.
Growth compare(const Tensor& once, const Tensor& twice) {
  constexpr int64_t kMostCompared = 1 << 16;
  const Shape& shape = once.shape();
  const Shape& larger = twice.shape();
  bool fits = shape.size() == larger.size();
  for (size_t d = 0; fits && d < shape.size(); ++d) {
    fits = larger[d] == shape[d] || larger[d] == 2 * shape[d];
  }
  if (!fits) {
    return unknown();
  }
  const std::vector<double> a = once.to_double(), b = twice.to_double();
  std::optional<int> degree;
  Shape index(shape.size(), 0);
  const int64_t count = std::min(once.num_elements(), kMostCompared);
  for (int64_t i = 0; i < count; ++i) {
    int64_t at = 0;
    for (size_t d = 0; d < shape.size(); ++d) {
      at = at * larger[d] + index[d];
    }
    const double first = a[static_cast<size_t>(i)], second = b[static_cast<size_t>(at)];
    if (first != second || first != 0) {
      const std::optional<int> own =
          first == second ? std::optional<int>(0) : octaves(first, second);
      if (!own || (degree && *degree != *own)) {
        return unknown();
      }
      degree = own;
    }
    for (size_t d = shape.size(); d-- > 0 && ++index[d] == shape[d];) {
      index[d] = 0;
    }
  }
  return {.degree = degree.value_or(0), .zero = !degree};
}

class GrowthFinder {
 public:
  GrowthFinder(const Graph& graph, const SampleCourse& course, const Graph* doubled)
      : graph_(graph),
        course_(course),
        doubled_(doubled),
        growths_(static_cast<size_t>(graph.num_values())),
        whole_(static_cast<size_t>(graph.num_values()), true) {
    for (const Node& node : graph.nodes()) {
      follow(node);
    }
  }

  const Growth& of(ValueId id) const { return growths_[static_cast<size_t>(id)]; }

 private:
  bool depends(ValueId id) const { return course_.depends[static_cast<size_t>(id)]; }
  bool has_place(ValueId id) const { return course_.places[static_cast<size_t>(id)].has_value(); }

  // The operands that are numbers to compute with, not indices: of integers and conditions those
  // that say something of the samples' number, and what is counted.
  std::vector<Growth> operands(const Node& node) {
    const bool counts = node.op_type.rfind("Reduce", 0) == 0;
    std::vector<Growth> found;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const ValueId id = node.inputs[i];
      if (id == kNoValue) {
        continue;
      }
      const Growth& own = of(id);
      if (is_floating(graph_.value(id).type.dtype)) {
        found.push_back(graph_.value(id).kind == ValueKind::kConstant ? constant(node, i) : own);
      } else if (!own.known || own.degree != 0 || own.reduced || (counts && i == 0)) {
        found.push_back(own);
      }
    }
    return found;
  }

  Growth constant(const Node& node, size_t input) {
    const ValueId id = node.inputs[input];
    const Value& value = graph_.value(id);
    const bool single = num_elements(value.type.shape) == 1;
    if (doubled_ == nullptr) {
      return {.scaled = single};
    }
    if (!value.constant.defined()) {
      return {.scaled = single};  // as the file has it
    }
    const auto found = constants_.find(id);
    return found != constants_.end()
               ? found->second
               : constants_.emplace(id, compare_constant(node, input)).first->second;
  }

  // The operand at twice as many samples; kNoValue where there is no such.
  ValueId counterpart_of(const Node& node, size_t input) const {
    const std::optional<ValueId> output =
        doubled_ == nullptr ? std::nullopt
                            : doubled_->find_value(graph_.value(node.outputs[0]).name);
    const NodeId twin = output ? doubled_->value(*output).producer : kNoNode;
    return twin == kNoNode || doubled_->node(twin).op_type != node.op_type ||
                   input >= doubled_->node(twin).inputs.size()
               ? kNoValue
               : doubled_->node(twin).inputs[input];
  }

  Growth compare_constant(const Node& node, size_t input) const {
    const Value& value = graph_.value(node.inputs[input]);
    const ValueId counterpart = counterpart_of(node, input);
    if (counterpart == kNoValue || doubled_->value(counterpart).kind != ValueKind::kConstant) {
      return unknown();
    }
    Growth growth = compare(contents(value), contents(doubled_->value(counterpart)));
    growth.scaled = num_elements(value.type.shape) == 1;
    return growth;
  }

  void follow(const Node& node) {
    const std::vector<Growth> given = operands(node);
    for (const ValueId id : node.outputs) {
      if (id == kNoValue) {
        continue;
      }
      Growth growth = grow(node, given, id);
      if (has_place(id)) {
        growth.reduced = false;  // samples that meet what was reduced: SampleCourse::met
        growth.linear = growth.known;
      }
      growths_[static_cast<size_t>(id)] = growth;
      whole_[static_cast<size_t>(id)] = !depends(id) || has_place(id) || keeps_all(node);
    }
  }

  // Whether all elements of all samples are still there, each as often as the others, behind a node
  // through which samples cannot be followed.
  bool keeps_all(const Node& node) const {
    static const std::set<std::string> kReorders = {"Identity", "Reshape", "Transpose", "Cast"};
    return (kReorders.count(node.op_type) != 0 || is_elementwise(node.op_type)) &&
           std::all_of(node.inputs.begin(), node.inputs.end(), [&](ValueId id) {
             return id == kNoValue || whole_[static_cast<size_t>(id)];
           });
  }

  // How many more elements a reduction adds up of twice as many samples, though it adds up none of
  // them: as a power of two.
  std::optional<int> octaves_of_batch(const Node& node) const {
    const ValueId counterpart = counterpart_of(node, 0);
    if (counterpart == kNoValue) {
      return doubled_ == nullptr ? std::optional<int>(0) : std::nullopt;
    }
    const auto ratio = [](const Shape& from, const Shape& to) {
      return static_cast<double>(num_elements(from)) /
             static_cast<double>(std::max<int64_t>(1, num_elements(to)));
    };
    const std::optional<ValueId> output = doubled_->find_value(graph_.value(node.outputs[0]).name);
    return octaves(
        ratio(graph_.value(node.inputs[0]).type.shape, graph_.value(node.outputs[0]).type.shape),
        ratio(doubled_->value(counterpart).type.shape, doubled_->value(*output).type.shape));
  }

  Growth grow(const Node& node, const std::vector<Growth>& given, ValueId output) const {
    static const std::set<std::string> kMoves = {"Identity",
                                                 "Reshape",
                                                 "Cast",
                                                 "Neg",
                                                 "Transpose",
                                                 "Slice",
                                                 "Expand",
                                                 "Gather",
                                                 "GatherND",
                                                 "GatherElements"};
    static const std::set<std::string> kAdds = {"Add", "Sub", "Concat"};
    static const std::set<std::string> kChooses = {"Where", "Max", "Min", "Relu", "Abs"};
    static const std::set<std::string> kProducts = {"Mul", "Div", "MatMul", "Einsum"};
    const std::string& type = node.op_type;
    if (given.empty()) {
      return {};
    }
    if (std::any_of(given.begin(), given.end(), [](const Growth& g) { return !g.known; })) {
      return unknown();
    }
    const bool reduces = reduces_samples(node, given, output);
    if (reduces && !is_whole(node, output)) {
      return unknown();
    }
    if (type.rfind("Reduce", 0) == 0) {
      const std::optional<int> octaves =
          depends(output) ? std::optional<int>(reduces ? 1 : 0) : octaves_of_batch(node);
      return octaves ? reduction(type, given[0], reduces, *octaves) : unknown();
    }
    if (type == "SoftmaxCrossEntropyLoss" || type == "NegativeLogLikelihoodLoss") {
      return loss_of_classes(type, given, reduces);
    }
    if (type == "MeanLoss") {
      return mean_of_items(node, given[0]);
    }
    if (kMoves.count(type) != 0) {
      // What picks a few of the samples does not add them up.
      return reduces ? unknown() : given.size() == 1 ? given[0] : other(given, reduces);
    }
    if (kAdds.count(type) != 0 || kChooses.count(type) != 0) {
      return sum(given, kAdds.count(type) != 0);
    }
    if (kProducts.count(type) != 0 || (type == "Gemm" && given.size() == 2)) {
      return product(type, given, reduces, course_.summed[static_cast<size_t>(output)]);
    }
    return other(given, reduces);
  }

  // Whether the node makes one of what were several samples.
  bool reduces_samples(const Node& node, const std::vector<Growth>& given, ValueId output) const {
    const bool from_reduced =
        std::any_of(given.begin(), given.end(), [](const Growth& g) { return g.reduced; });
    if (from_reduced || !depends(output) || has_place(output)) {
      return false;
    }
    // Of samples that are lost, or of an output without them: only what adds over an axis reduces.
    const bool is_reduction = node.op_type.rfind("Reduce", 0) == 0 ||
                              node.op_type == "SoftmaxCrossEntropyLoss" ||
                              node.op_type == "NegativeLogLikelihoodLoss";
    return course_.reduced[static_cast<size_t>(output)] || is_reduction;
  }

  // Of samples that cannot be followed only all together are known to be reduced.
  bool is_whole(const Node& node, ValueId output) const {
    return course_.reduced[static_cast<size_t>(output)] ||
           (!has_place(node.inputs.at(0)) && whole_[static_cast<size_t>(node.inputs[0])] &&
            num_elements(graph_.value(output).type.shape) == 1);
  }

  // `grown`: the power of the number of samples as which that of the added elements grows.
  static Growth reduction(const std::string& type, Growth growth, bool reduces, int grown) {
    if (type == "ReduceSum" || type == "ReduceMean") {
      growth.degree += type == "ReduceSum" ? grown : 0;
    } else if (type == "ReduceL1" || type == "ReduceSumSquare") {
      growth.degree = growth.degree * (type == "ReduceL1" ? 1 : 2) + grown;
      growth.linear = growth.linear && !growth.reduced;
    } else {
      return grown == 0 || reduces ? other({growth}, reduces) : unknown();
    }
    growth.reduced = growth.reduced || reduces;
    return growth;
  }

  static Growth loss_of_classes(const std::string& type,
                                const std::vector<Growth>& given,
                                bool reduces) {
    Growth growth = type == "SoftmaxCrossEntropyLoss"
                        ? other(given, false)
                        : product(type, given, false, false);  // log-likelihoods are added up
    if (!growth.known) {
      return growth;
    }
    growth.linear = growth.linear && !growth.reduced;
    growth.degree += reduces ? 1 : 0;
    growth.reduced = growth.reduced || reduces;
    return growth;
  }

  // A mean of items is one over samples unless some of them do not count.
  Growth mean_of_items(const Node& node, Growth sum) const {
    const NodeId producer = graph_.value(node.inputs[1]).producer;
    const Node* count = producer == kNoNode ? nullptr : &graph_.node(producer);
    if (count == nullptr || count->op_type != "ItemCount" || count->inputs.size() > 1 ||
        count->attributes.has("ignore_index")) {
      return unknown();
    }
    sum.degree -= 1;
    return sum;
  }

  // Of equal degrees; `linear`: not of the larger, or of one chosen.
  static Growth sum(const std::vector<Growth>& given, bool linear) {
    Growth growth{.zero = true};
    for (const Growth& term : given) {
      growth.reduced = growth.reduced || term.reduced;
      growth.linear = growth.linear && term.linear;
      growth.scaled = growth.scaled || (term.scaled && term.reduced);
      if (!term.zero) {
        if (!growth.zero && growth.degree != term.degree) {
          return unknown();
        }
        growth.degree = term.degree;
        growth.zero = false;
      }
    }
    growth.linear = growth.linear && (linear || !growth.reduced);
    return growth;
  }

  static Growth product(const std::string& type,
                        const std::vector<Growth>& given,
                        bool reduces,
                        bool summed) {
    Growth growth;
    int num_reduced = 0;
    for (size_t i = 0; i < given.size(); ++i) {
      const bool divides = type == "Div" && i > 0;
      growth.degree += divides ? -given[i].degree : given[i].degree;
      growth.zero = growth.zero || given[i].zero;
      growth.linear = growth.linear && given[i].linear && !(divides && given[i].reduced);
      growth.scaled = growth.scaled || given[i].scaled;
      num_reduced += given[i].reduced ? 1 : 0;
    }
    growth.reduced = num_reduced > 0 || reduces;
    growth.linear = growth.linear && num_reduced <= 1 && (!reduces || summed);
    growth.degree += reduces ? 1 : 0;
    return growth;
  }

  // Of any other function, which is known only of what does not grow.
  static Growth other(const std::vector<Growth>& given, bool reduces) {
    Growth growth;
    for (const Growth& operand : given) {
      if (!operand.known || (operand.degree != 0 && !operand.zero)) {
        return unknown();
      }
      growth.reduced = growth.reduced || operand.reduced;
    }
    growth.linear = !growth.reduced && !reduces;
    growth.reduced = growth.reduced || reduces;
    return growth;
  }

  const Graph& graph_;
  const SampleCourse& course_;
  const Graph* doubled_;
  std::vector<Growth> growths_;
  std::vector<bool> whole_;  // by value: see keeps_all
  std::map<ValueId, Growth> constants_;
};

}  // namespace

OfSamples of_samples(const Graph& graph,
                     const SampleCourse& course,
                     ValueId value,
                     const Graph* doubled) {
  if (!course.depends[static_cast<size_t>(value)]) {
    return OfSamples::kMean;
  }
  const Growth growth = GrowthFinder(graph, course, doubled).of(value);
  const bool told =
      growth.known && growth.linear && growth.reduced && !(growth.scaled && doubled == nullptr);
  return told && growth.degree == 1   ? OfSamples::kSum
         : told && growth.degree == 0 ? OfSamples::kMean
                                      : OfSamples::kOther;
}

std::optional<int> degree_in_samples(const Graph& graph,
                                     const SampleCourse& course,
                                     ValueId value,
                                     const Graph* doubled) {
  const Growth growth = GrowthFinder(graph, course, doubled).of(value);
  return growth.known ? std::optional<int>(growth.degree) : std::nullopt;
}

}  // namespace trainrt
