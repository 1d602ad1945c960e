#include "graph/kernel_pair.h"

#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace trainrt {

namespace {

std::map<std::tuple<std::string, std::string, Backend>, KernelPairFactory>& pairs() {
  static std::map<std::tuple<std::string, std::string, Backend>, KernelPairFactory> registered;
  return registered;
}

}  // namespace

RegisterKernelPair::RegisterKernelPair(const char* first,
                                       const char* second,
                                       Backend backend,
                                       KernelPairFactory factory) {
  const bool is_new =
      pairs().emplace(std::tuple(first, second, backend), std::move(factory)).second;
  TRAINRT_CHECK(is_new, "two kernels for ", first, " and ", second);
}

int epilogue_input(const Graph& graph, const Node& node) {
  const bool grad = node.op_type == "GeluGrad";
  const bool tanh = node.attributes.get_string("approximate", "none") == "tanh";
  if (node.op_type != "Relu" && !(tanh && (grad || node.op_type == "Gelu"))) {
    return -1;
  }
  const int input = grad ? 1 : 0;
  const NodeId from = graph.value(node.inputs[static_cast<size_t>(input)]).producer;
  if (from == kNoNode) {
    return -1;
  }
  const std::string& product = graph.node(from).op_type;
  return product == "MatMul" || (product == "MatMulAdd" && !grad) ? input : -1;
}

bool has_kernel_pair(const std::string& first, const std::string& second, const DeviceSpec& spec) {
  return !spec.reference_kernels && pairs().count({first, second, spec.backend}) != 0;
}

Kernel make_kernel_pair(const NodePair& pair, const DeviceSpec& spec) {
  return pairs().at({pair.first.node().op_type, pair.second.node().op_type, spec.backend})(pair,
                                                                                           spec);
}

void run_one_by_one(const Kernel& first,
                    const Node& second_node,
                    const Kernel& second,
                    KernelContext& context) {
  const size_t cut = context.node().inputs.size();
  std::vector<TensorRef> inputs, outputs;
  for (int i = 0; i < context.num_inputs(); ++i) {
    inputs.push_back(context.has_input(i) ? TensorRef{context.raw_input(i), &context.input_type(i)}
                                          : TensorRef{});
  }
  for (int i = 0; i < context.num_outputs(); ++i) {
    outputs.push_back({context.raw_output(i), &context.output_type(i)});
  }
  const std::span<const TensorRef> all_inputs = inputs, all_outputs = outputs;
  KernelContext one(context.node(),
                    all_inputs.first(cut),
                    all_outputs.first(1),
                    context.workspace(),
                    context.device(),
                    context.step());
  first(one);
  KernelContext two(second_node,
                    all_inputs.subspan(cut),
                    all_outputs.subspan(1),
                    {},
                    context.device(),
                    context.step());
  second(two);
}

}  // namespace trainrt
