#include "graph/passes/layout.h"

#include <algorithm>
#include <map>

#include "graph/graph_builder.h"
#include "graph/passes/pass.h"

namespace trainrt {

namespace {

std::map<std::string, ImageRule>& rules() {
  static std::map<std::string, ImageRule> instance;
  return instance;
}

// Old dim of each new one: [0, 2, ..., ndim - 1, 1], and back.
std::vector<int64_t> to_channels_last(size_t ndim) {
  std::vector<int64_t> perm = {0};
  for (size_t d = 2; d < ndim; ++d) {
    perm.push_back(static_cast<int64_t>(d));
  }
  perm.push_back(1);
  return perm;
}

std::vector<int64_t> to_channels_first(size_t ndim) {
  std::vector<int64_t> perm = {0, static_cast<int64_t>(ndim) - 1};
  for (size_t d = 1; d + 1 < ndim; ++d) {
    perm.push_back(static_cast<int64_t>(d));
  }
  return perm;
}

Shape permuted(const Shape& shape, const std::vector<int64_t>& perm) {
  Shape result;
  for (const int64_t d : perm) {
    result.push_back(shape[static_cast<size_t>(d)]);
  }
  return result;
}

// Where dim `axis` (may be negative) of an image of `ndim` dims goes.
int64_t turned_axis(int64_t axis, size_t ndim) {
  const int64_t n = static_cast<int64_t>(ndim);
  const int64_t at = axis < 0 ? axis + n : axis;
  return at == 0 ? 0 : at == 1 ? n - 1 : at - 1;
}

// Moving dims of size one moves no element.
bool is_reshape(const Shape& shape, const std::vector<int64_t>& perm) {
  int64_t last = -1;
  for (const int64_t d : perm) {
    if (shape[static_cast<size_t>(d)] != 1) {
      if (d < last) {
        return false;
      }
      last = d;
    }
  }
  return true;
}

class Turner {
 public:
  explicit Turner(Graph source)
      : source_(std::move(source)),
        builder_(result_),
        first_(static_cast<size_t>(source_.num_values()), kNoValue),
        last_(first_) {}

  Graph run() {
    for (ValueId id = 0; id < source_.num_values(); ++id) {
      if (source_.value(id).producer == kNoNode) {
        first_[static_cast<size_t>(id)] = result_.add_value(source_.value(id));
      }
    }
    for (const Node& node : source_.nodes()) {
      builder_.set_region(node.region);
      builder_.set_source_index(node.source_index);
      const ImageRule* rule = find_image_rule(node.op_type);
      if (rule == nullptr || !turn(node, *rule)) {
        copy(node);
      }
    }
    for (const ValueId id : source_.outputs()) {
      result_.outputs().push_back(in_onnx_order(id));
    }
    for (const StateUpdate& update : source_.updates()) {
      result_.updates().push_back({in_onnx_order(update.target), in_onnx_order(update.new_value)});
    }
    return std::move(result_);
  }

 private:
  const Shape& shape(ValueId id) const { return source_.value(id).type.shape; }
  bool is_turned(ValueId id) const { return last_[static_cast<size_t>(id)] != kNoValue; }

  ValueId permute(ValueId from,
                  const Shape& shape,
                  const std::vector<int64_t>& perm,
                  const std::string& name) {
    return is_reshape(shape, perm)
               ? builder_.op(
                     "Reshape", {from}, {{"shape", permuted(shape, perm)}}, name + "/turn", name)
               : builder_.op("Transpose", {from}, {{"perm", perm}}, name + "/turn", name);
  }

  ValueId in_onnx_order(ValueId id) {
    if (id == kNoValue) {
      return kNoValue;
    }
    ValueId& known = first_[static_cast<size_t>(id)];
    if (known == kNoValue) {
      const ValueId turned = last_[static_cast<size_t>(id)];
      const Shape from = result_.value(turned).type.shape;
      known = permute(turned, from, to_channels_first(from.size()), source_.value(id).name);
    }
    return known;
  }

  ValueId channels_last(ValueId id) {
    ValueId& known = last_[static_cast<size_t>(id)];
    if (known == kNoValue) {
      known = permute(first_[static_cast<size_t>(id)],
                      shape(id),
                      to_channels_last(shape(id).size()),
                      source_.value(id).name + "/nhwc");
    }
    return known;
  }

  void copy(const Node& original) {
    Node node = original;
    for (ValueId& input : node.inputs) {
      input = in_onnx_order(input);
    }
    add(std::move(node), original, /*turned=*/false);
  }

  // Output 0 is turned; what else there is, is not an image.
  void add(Node node, const Node& original, bool turned) {
    TensorTypes types;
    std::vector<std::string> names;
    for (size_t i = 0; i < original.outputs.size(); ++i) {
      const ValueId output = original.outputs[i];
      types.push_back(output == kNoValue ? TensorType{} : source_.value(output).type);
      names.push_back(output == kNoValue ? "" : source_.value(output).name);
      if (turned && i == 0) {
        types[0].shape = permuted(types[0].shape, to_channels_last(types[0].shape.size()));
        names[0] += "/nhwc";
      }
    }
    const NodeId id = result_.add_node(std::move(node), types, std::move(names));
    for (size_t i = 0; i < original.outputs.size(); ++i) {
      const ValueId output = original.outputs[i];
      if (output == kNoValue) {
        result_.node(id).outputs[i] = kNoValue;
      } else {
        (turned && i == 0 ? last_ : first_)[static_cast<size_t>(output)] =
            result_.node(id).outputs[i];
      }
    }
  }

  bool turn(const Node& node, const ImageRule& rule) {
    switch (rule.form) {
      case ImageForm::kLayout:
        return turn_layout(node, rule);
      case ImageForm::kElementwise:
        return turn_elementwise(node);
      case ImageForm::kAxis:
        return turn_axis(node);
      case ImageForm::kAxes:
        return turn_axes(node);
    }
    return false;
  }

  bool turn_layout(const Node& original, const ImageRule& rule) {
    const bool follows = std::any_of(rule.images.begin(), rule.images.end(), [&](int i) {
      return has_input(original, i) && is_turned(original.inputs[static_cast<size_t>(i)]);
    });
    const bool first = original.attributes.get_string("layout", "nchw") == "nchw";
    const bool one_image = std::all_of(original.outputs.begin() + 1,
                                       original.outputs.end(),
                                       [](ValueId id) { return id == kNoValue; });
    const bool is_image = shape(original.inputs[static_cast<size_t>(rule.images[0])]).size() >= 3;
    if (!(rule.leads || follows) || !first || !one_image || !is_image) {
      return false;
    }
    Node node = original;
    for (size_t i = 0; i < node.inputs.size(); ++i) {
      const bool image = std::count(rule.images.begin(), rule.images.end(), i) != 0;
      ValueId& input = node.inputs[i];
      input = image && input != kNoValue ? channels_last(input) : in_onnx_order(input);
    }
    node.attributes.set("layout", std::string("nhwc"));
    const bool makes_image = shape(original.outputs[0]).size() >= 3;
    add(std::move(node), original, makes_image);
    return true;
  }

  static bool has_input(const Node& node, int i) {
    return i < static_cast<int>(node.inputs.size()) &&
           node.inputs[static_cast<size_t>(i)] != kNoValue;
  }

  bool any_turned(const Node& node) const {
    return std::any_of(node.inputs.begin(), node.inputs.end(), [&](ValueId id) {
      return id != kNoValue && is_turned(id);
    });
  }

  // Operands of fewer dims get leading dims of size one, as broadcasting gives them.
  bool turn_elementwise(const Node& original) {
    const size_t ndim = shape(original.outputs[0]).size();
    const bool same_rank =
        std::all_of(original.inputs.begin(), original.inputs.end(), [&](ValueId id) {
          return !is_turned(id) || shape(id).size() == ndim;
        });
    if (!any_turned(original) || !same_rank) {
      return false;
    }
    Node node = original;
    for (ValueId& input : node.inputs) {
      if (shape(input).size() == ndim) {
        input = channels_last(input);
      } else if (num_elements(shape(input)) == 1) {
        input = in_onnx_order(input);
      } else {
        Shape full(ndim - shape(input).size(), 1);
        full.insert(full.end(), shape(input).begin(), shape(input).end());
        const std::string name = result_.unique_value_name(source_.value(input).name + "/nhwc");
        const ValueId whole =
            builder_.op("Reshape", {in_onnx_order(input)}, {{"shape", full}}, name + "/whole");
        input = permute(whole, full, to_channels_last(ndim), name);
      }
    }
    add(std::move(node), original, /*turned=*/true);
    return true;
  }

  bool turn_axis(const Node& original) {
    if (!any_turned(original)) {
      return false;
    }
    Node node = original;
    for (ValueId& input : node.inputs) {
      input = channels_last(input);
    }
    const size_t ndim = shape(original.outputs[0]).size();
    node.attributes.set("axis", turned_axis(original.attributes.get_int("axis"), ndim));
    add(std::move(node), original, /*turned=*/true);
    return true;
  }

  bool turn_axes(const Node& original) {
    if (!any_turned(original)) {
      return false;
    }
    const size_t ndim = shape(original.inputs[0]).size();
    std::vector<int64_t> axes = original.attributes.get_ints("axes");
    const bool keepdims = original.attributes.get_int("keepdims", 1) != 0;
    for (int64_t& axis : axes) {
      axis = turned_axis(axis, ndim);
    }
    std::sort(axes.begin(), axes.end());
    // Without keepdims the result is no image, and must come out in ONNX order by itself: when the
    // channel has no spatial dim left to stand behind.
    const bool channel = axes.back() == static_cast<int64_t>(ndim) - 1;
    const size_t spatial = axes.size() - (channel ? 1 : 0) - (axes.front() == 0 ? 1 : 0);
    if (!keepdims && !channel && spatial != ndim - 2) {
      return false;
    }
    Node node = original;
    node.inputs[0] = channels_last(node.inputs[0]);
    node.attributes.set("axes", axes);
    add(std::move(node), original, keepdims);
    return true;
  }

  const Graph source_;
  Graph result_;
  GraphBuilder builder_;
  std::vector<ValueId> first_, last_;  // by old id: in ONNX order, channels-last
};

}  // namespace

RegisterImageRule::RegisterImageRule(const std::string& op_type, ImageRule rule) {
  TRAINRT_CHECK(
      rules().emplace(op_type, std::move(rule)).second, op_type, " has two rules for images");
}

const ImageRule* find_image_rule(const std::string& op_type) {
  const auto at = rules().find(op_type);
  return at == rules().end() ? nullptr : &at->second;
}

Graph turn_images(const Graph& graph) {
  return Turner(eliminate_dead_code(graph)).run();
}

}  // namespace trainrt
