// One pass in node order tells for each name whether it is a known number, a uniform draw, a random
// choice or a mask; one backwards keeps the masks whose readers all take a number in their place.
#include "graph/onnx_random_masks.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "graph/onnx_model.h"
#include "graph/onnx_tensor.h"

namespace trainrt {

namespace {

using Nodes = google::protobuf::RepeatedPtrField<onnx::NodeProto>;
using Tensors = google::protobuf::RepeatedPtrField<onnx::TensorProto>;

// Means of masks divided by the keep rate are 1 but for rounding.
constexpr double kRounding = 1e-6;

struct Number {
  double value = 0;
  int data_type = onnx::TensorProto::FLOAT;
};

struct Draw {
  double low = 0;
  double high = 1;
  // Probability of a draw below `limit`.
  double below(double limit) const { return std::clamp((limit - low) / (high - low), 0.0, 1.0); }
};

const onnx::AttributeProto* find_attribute(const onnx::NodeProto& node, const char* name) {
  for (const onnx::AttributeProto& attribute : node.attribute()) {
    if (attribute.name() == name && attribute.ref_attr_name().empty()) {
      return &attribute;
    }
  }
  return nullptr;
}

std::optional<Number> single_number(const onnx::TensorProto& tensor) {
  const std::optional<DType> dtype = dtype_from_onnx(tensor.data_type());
  if (!dtype || !is_floating(*dtype) || has_external_data(tensor)) {
    return std::nullopt;
  }
  if (num_elements(tensor_type(tensor, tensor.name()).shape) != 1) {
    return std::nullopt;
  }
  return Number{tensor_source(nullptr, tensor, WeightFiles()).load().to_double()[0],
                tensor.data_type()};
}

class MaskFinder {
 public:
  explicit MaskFinder(const Tensors& initializers) {
    for (const onnx::TensorProto& tensor : initializers) {
      if (const std::optional<Number> number = single_number(tensor)) {
        numbers_[tensor.name()] = *number;
      }
    }
  }

  void visit(const onnx::NodeProto& node) {
    if (!canonical_domain(node.domain()).empty() || node.output_size() != 1) {
      return;
    }
    const std::string& op = node.op_type();
    if (op == "Constant") {
      visit_constant(node);
    } else if (op == "RandomUniform" || op == "RandomUniformLike") {
      const onnx::AttributeProto* low = find_attribute(node, "low");
      const onnx::AttributeProto* high = find_attribute(node, "high");
      const Draw draw{low == nullptr ? 0.0 : low->f(), high == nullptr ? 1.0 : high->f()};
      if (draw.low < draw.high) {
        draws_[node.output(0)] = draw;
      }
    } else if (op == "Bernoulli") {
      if (const Number* keep = find(filled_, node)) {
        set_mask(node, {keep->value, cast_type(node, "dtype", keep->data_type)});
      } else if (const Number* number = find(numbers_, node)) {
        set_mask(node, {number->value, cast_type(node, "dtype", number->data_type)});
      }
    } else if (op == "Expand" || op == "ConstantOfShape") {
      visit_fill(node);
    } else if (op == "Identity" || op == "Cast") {
      visit_cast(node);
    } else if (op == "Not") {
      if (const double* probability = find(choices_, node)) {
        const double dropped = 1 - *probability;
        choices_[node.output(0)] = dropped;
      }
    } else if (op == "Floor") {
      if (const Number* keep = find(raised_, node)) {
        set_mask(node, Number(*keep));
      }
    } else if (node.input_size() == 2) {
      visit_binary(node);
    }
  }

  // Only those whose readers are content with a number, or are identities in its presence.
  SettledNodes settled(const Nodes& nodes, const std::vector<std::string>& outputs) const {
    std::set<std::string> bound(outputs.begin(), outputs.end());  // names whose shape matters
    for (const onnx::NodeProto& node : nodes) {
      for (const onnx::AttributeProto& attribute : node.attribute()) {
        collect_reads(attribute.g(), bound);
      }
    }
    SettledNodes result;
    for (int i = nodes.size(); i-- > 0;) {
      const onnx::NodeProto& node = nodes.Get(i);
      const bool is_mask = node.output_size() == 1 && masks_.count(node.output(0)) != 0;
      const bool settles = is_mask && bound.count(node.output(0)) == 0;
      if (settles) {
        const Number& number = masks_.at(node.output(0));
        result[&node] = {-1, number.value, number.data_type};
        continue;
      }
      const int kept = is_mask ? -1 : kept_operand(node);
      for (int j = 0; j < node.input_size(); ++j) {
        if (kept < 0 || j == kept) {
          bound.insert(node.input(j));
        }
      }
      if (kept >= 0 && bound.count(node.input(1 - kept)) == 0 &&
          std::abs(masks_.at(node.input(1 - kept)).value - 1) <= kRounding) {
        result[&node] = {kept, 1, onnx::TensorProto::FLOAT};
      }
    }
    // What another reader bound later in this walk stays random, and so do its readers.
    for (auto it = result.begin(); it != result.end();) {
      const onnx::NodeProto& node = *it->first;
      const int kept = kept_operand(node);
      const std::string& mask = it->second.input < 0 ? node.output(0) : node.input(1 - kept);
      it = bound.count(mask) != 0 ? result.erase(it) : std::next(it);
    }
    return result;
  }

 private:
  template <typename Map>
  const typename Map::mapped_type* find(const Map& map,
                                        const onnx::NodeProto& node,
                                        int input = 0) const {
    if (input >= node.input_size()) {
      return nullptr;
    }
    const auto it = map.find(node.input(input));
    return it == map.end() ? nullptr : &it->second;
  }

  static int cast_type(const onnx::NodeProto& node, const char* attribute, int otherwise) {
    const onnx::AttributeProto* type = find_attribute(node, attribute);
    return type == nullptr ? otherwise : static_cast<int>(type->i());
  }

  static void collect_reads(const onnx::GraphProto& graph, std::set<std::string>& reads) {
    for (const onnx::NodeProto& node : graph.node()) {
      reads.insert(node.input().begin(), node.input().end());
      for (const onnx::AttributeProto& attribute : node.attribute()) {
        collect_reads(attribute.g(), reads);
      }
    }
    for (const onnx::ValueInfoProto& output : graph.output()) {
      reads.insert(output.name());
    }
  }

  void set_mask(const onnx::NodeProto& node, Number mean) {
    const std::optional<DType> dtype = dtype_from_onnx(mean.data_type);
    if (dtype && is_floating(*dtype)) {
      masks_[node.output(0)] = mean;
    } else if (dtype == DType::kBool) {
      choices_[node.output(0)] = mean.value;
    }
  }

  void visit_constant(const onnx::NodeProto& node) {
    if (const onnx::AttributeProto* tensor = find_attribute(node, "value")) {
      if (const std::optional<Number> number = single_number(tensor->t())) {
        numbers_[node.output(0)] = *number;
      }
    } else if (const onnx::AttributeProto* number = find_attribute(node, "value_float")) {
      numbers_[node.output(0)] = {number->f(), onnx::TensorProto::FLOAT};
    }
  }

  void visit_fill(const onnx::NodeProto& node) {
    if (node.op_type() == "Expand") {
      if (const Number* number = find(numbers_, node)) {
        filled_[node.output(0)] = *number;
      }
      return;
    }
    const onnx::AttributeProto* value = find_attribute(node, "value");
    if (const std::optional<Number> number =
            value == nullptr ? Number{} : single_number(value->t())) {
      filled_[node.output(0)] = *number;
    }
  }

  void visit_cast(const onnx::NodeProto& node) {
    const bool cast = node.op_type() == "Cast";
    const auto retyped = [&](Number number) {
      number.data_type = cast ? cast_type(node, "to", number.data_type) : number.data_type;
      return number;
    };
    if (const Number* number = find(numbers_, node)) {
      numbers_[node.output(0)] = retyped(*number);
    } else if (const Number* same = find(filled_, node)) {
      filled_[node.output(0)] = retyped(*same);
    } else if (const Number* mask = find(masks_, node)) {
      set_mask(node, retyped(*mask));
    } else if (const double* probability = find(choices_, node)) {
      set_mask(node, retyped({*probability, onnx::TensorProto::BOOL}));
    } else if (const Draw* draw = find(draws_, node)) {
      draws_[node.output(0)] = *draw;
    }
  }

  void visit_binary(const onnx::NodeProto& node) {
    const std::string& op = node.op_type();
    for (const int number_at : {0, 1}) {
      const Number* number = find(numbers_, node, number_at);
      if (number == nullptr) {
        continue;
      }
      if (const Draw* draw = find(draws_, node, 1 - number_at)) {
        const bool less = op == "Less" || op == "LessOrEqual";
        if (less || op == "Greater" || op == "GreaterOrEqual") {
          const double below = draw->below(number->value);
          choices_[node.output(0)] = less == (number_at == 1) ? below : 1 - below;
        } else if (op == "Add" && draw->low == 0 && draw->high == 1 && number->value >= 0 &&
                   number->value <= 1) {
          raised_[node.output(0)] = *number;  // its Floor is 1 with this probability
        }
        return;
      }
      if (const Number* mask = find(masks_, node, 1 - number_at)) {
        if (op == "Mul") {
          set_mask(node, {mask->value * number->value, mask->data_type});
        } else if (op == "Div" && number_at == 1 && number->value != 0) {
          set_mask(node, {mask->value / number->value, mask->data_type});
        }
        return;
      }
    }
  }

  // Of a product with a mask the other operand; -1 for all other nodes.
  int kept_operand(const onnx::NodeProto& node) const {
    if (node.op_type() != "Mul" || !canonical_domain(node.domain()).empty() ||
        node.input_size() != 2) {
      return -1;
    }
    const bool first = masks_.count(node.input(0)) != 0;
    const bool second = masks_.count(node.input(1)) != 0;
    return first == second ? -1 : (first ? 1 : 0);
  }

  std::map<std::string, Number> numbers_;  // one element
  std::map<std::string, Number> filled_;   // all elements the same
  std::map<std::string, Draw> draws_;
  std::map<std::string, Number> raised_;
  std::map<std::string, double> choices_;  // booleans: probability of true
  std::map<std::string, Number> masks_;    // floats: mean
};

}  // namespace

SettledNodes settle_random_masks(const Nodes& nodes,
                                 const Tensors& initializers,
                                 const std::vector<std::string>& outputs) {
  if (std::none_of(nodes.begin(), nodes.end(), draws_random_numbers)) {
    return {};
  }
  MaskFinder finder(initializers);
  for (const onnx::NodeProto& node : nodes) {
    finder.visit(node);
  }
  return finder.settled(nodes, outputs);
}

SettledNodes settle_random_masks(const onnx::GraphProto& graph) {
  std::vector<std::string> outputs;
  for (const onnx::ValueInfoProto& output : graph.output()) {
    outputs.push_back(output.name());
  }
  return settle_random_masks(graph.node(), graph.initializer(), outputs);
}

bool draws_random_numbers(const onnx::NodeProto& node) {
  static const std::set<std::string> kOps = {"Bernoulli",
                                             "Multinomial",
                                             "RandomNormal",
                                             "RandomNormalLike",
                                             "RandomUniform",
                                             "RandomUniformLike"};
  return canonical_domain(node.domain()).empty() && kOps.count(node.op_type()) != 0;
}

}  // namespace trainrt
