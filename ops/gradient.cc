// ONNX's Gradient operator (ai.onnx.preview.training) in a graph that is evaluated as it stands:
// the derivative of the tensor named `y` by those named `xs`, for an upstream gradient of ones. The
// operands must be the tensors of those names: differentiation at another point would mean to
// evaluate the graph again. In training_info graph/onnx_training_info handles Gradient itself.
#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

void upgrade_gradient(UpgradeContext& u) {
  const std::vector<std::string> xs = u.attributes().get_strings("xs", {});
  const std::vector<std::string> zs = u.attributes().get_strings("zs", {});
  std::vector<std::string> names = xs;
  names.insert(names.end(), zs.begin(), zs.end());
  if (static_cast<int>(names.size()) != u.num_inputs()) {
    u.fail(concat(
        "names ", names.size(), " tensors in xs and zs, but has ", u.num_inputs(), " inputs"));
  }
  for (int i = 0; i < u.num_inputs(); ++i) {
    if (u.graph().find_value(names[static_cast<size_t>(i)]) != u.input(i)) {
      u.fail(concat("input ",
                    i,
                    " is not the tensor '",
                    names[static_cast<size_t>(i)],
                    "' that it is named after; differentiating at another point is not supported"));
    }
  }
  const std::string y = u.attributes().get_string("y");
  const std::optional<ValueId> output = u.graph().find_value(y);
  if (!output) {
    u.fail(concat("y names '", y, "', which nothing in the graph computes"));
  }
  const std::vector<ValueId> wanted(u.inputs().begin(),
                                    u.inputs().begin() + static_cast<std::ptrdiff_t>(xs.size()));
  const ValueId seed = u.fill(1, u.type(*output));
  const std::vector<ValueId> grads = differentiate(u.graph(), {*output}, {seed}, wanted);
  for (size_t i = 0; i < grads.size(); ++i) {
    if (u.wants_output(static_cast<int>(i))) {
      u.set_output(static_cast<int>(i), grads[i] == kNoValue ? u.zeros_like(wanted[i]) : grads[i]);
    }
  }
}

const RegisterUpgrade kGradient{"ai.onnx.preview.training", "Gradient", upgrade_gradient};

}  // namespace

}  // namespace trainrt
