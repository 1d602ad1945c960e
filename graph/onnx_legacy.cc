// Before opset 7 a binary operator broadcast only when asked to, and then aligned its second
// operand at `axis` instead of at the last dim; PRelu aligned its slopes at the channel axis.
// Reshaping that operand gives today's form.
#include <set>

#include "graph/onnx_translate.h"
#include "graph/op_def.h"

namespace trainrt {

namespace {

constexpr int kFirstOpsetWithBroadcasting = 7;

}  // namespace

bool OnnxTranslator::translate_legacy(const onnx::NodeProto& node,
                                      const std::vector<ValueId>& inputs) {
  static const std::set<std::string> kBinary = {
      "Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Less", "Greater", "Equal", "PRelu"};
  if (!canonical_domain(node.domain()).empty() || opset("") >= kFirstOpsetWithBroadcasting ||
      kBinary.count(node.op_type()) == 0 || inputs.size() != 2) {
    return false;
  }
  const Attributes values = attributes(node);
  const Shape a = graph_.value(required_input(inputs, 0)).type.shape;
  Shape b = graph_.value(required_input(inputs, 1)).type.shape;
  const auto ndim = static_cast<int64_t>(a.size());
  const bool channels = node.op_type() == "PRelu" && b.size() == 1 && b[0] != 1 && ndim > 1;
  std::vector<ValueId> operands = inputs;
  if (channels || values.get_int("broadcast", 0) != 0) {
    const int64_t last = ndim - static_cast<int64_t>(b.size());
    int64_t axis = channels ? 1 : values.get_int("axis", last);
    axis += axis < 0 ? ndim : 0;
    TRAINRT_REQUIRE(axis >= 0 && axis <= last,
                    kInvalidModel,
                    "axis ",
                    axis,
                    " does not align ",
                    shape_string(b),
                    " with ",
                    shape_string(a));
    b.resize(b.size() + static_cast<size_t>(last - axis), 1);
    GraphBuilder builder(graph_);
    builder.set_source_index(source_index_);
    operands[1] = builder.reshape(inputs[1], b);
  }
  onnx::NodeProto plain = node;
  plain.clear_attribute();
  const auto* rule = find_upgrade("", node.op_type());
  if (rule == nullptr && find_op(node.op_type()) == nullptr) {
    return false;
  }
  upgrade(plain, operands, rule);
  return true;
}

}  // namespace trainrt
