#include "graph/evaluator.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "graph/op_def.h"

namespace trainrt {

namespace {

// One thread, blocks in order.
class HostContext : public DeviceContext {
 public:
  explicit HostContext(bool reference_kernels) { spec_.reference_kernels = reference_kernels; }
  const DeviceSpec& spec() const override { return spec_; }
  void parallel_for(int64_t n,
                    int64_t grain,
                    const std::function<void(int64_t, int64_t)>& fn) override {
    for (int64_t begin = 0; begin < n; begin += grain) {
      fn(begin, std::min(n, begin + grain));
    }
  }
  void* stream() override { return nullptr; }

 private:
  DeviceSpec spec_;
};

}  // namespace

std::vector<Tensor> evaluate_node(const Graph& graph,
                                  const Node& node,
                                  const std::vector<Tensor>& inputs,
                                  const EvaluateOptions& options) {
  HostContext device(options.reference_kernels);
  const OpContext op(graph, node);
  const OpDef& def = get_op(node.op_type);
  std::vector<Tensor> input_copies = inputs;
  std::vector<Tensor> outputs(node.outputs.size());
  std::vector<TensorType> input_types(inputs.size());
  std::vector<TensorRef> input_refs(inputs.size());
  std::vector<TensorRef> output_refs(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (node.outputs[i] == kNoValue) {
      continue;
    }
    const TensorType& type = graph.value(node.outputs[i]).type;
    outputs[i] = Tensor(type.dtype, type.shape);
    for (const Inplace& alias : def.inplace) {
      if (alias.always && alias.output == static_cast<int>(i)) {
        outputs[i] = inputs[static_cast<size_t>(alias.input)].clone();
        input_copies[static_cast<size_t>(alias.input)] = outputs[i];
      }
    }
    output_refs[i] = {outputs[i].raw(), &type};
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (node.inputs[i] != kNoValue) {
      input_types[i] = {input_copies[i].dtype(), input_copies[i].shape()};
      input_refs[i] = {input_copies[i].raw(), &input_types[i]};
    }
  }
  const int64_t workspace_size = workspace_bytes(op, device.spec());
  Tensor workspace(DType::kUInt8, {workspace_size});
  KernelContext context(node,
                        input_refs,
                        output_refs,
                        {workspace.raw(), static_cast<size_t>(workspace_size)},
                        device,
                        options.step);
  make_kernel(op, device.spec())(context);
  return outputs;
}

Tensor initial_value(const Value& value) {
  if (value.constant.defined()) {
    return value.constant;
  }
  if (value.source.load) {
    return value.source.load();
  }
  return Tensor(value.type.dtype, value.type.shape);
}

std::vector<Tensor> evaluate(const Graph& graph,
                             const std::map<std::string, Tensor>& feeds,
                             const std::vector<ValueId>& fetches,
                             const EvaluateOptions& options) {
  std::vector<Tensor> values(static_cast<size_t>(graph.num_values()));
  const auto read = [&](ValueId id) -> Tensor {
    if (id == kNoValue) {
      return {};
    }
    Tensor& tensor = values[static_cast<size_t>(id)];
    if (!tensor.defined()) {
      const Value& value = graph.value(id);
      const auto feed = feeds.find(value.name);
      TRAINRT_REQUIRE(feed != feeds.end() || value.kind != ValueKind::kInput,
                      kInvalidArgument,
                      "input '",
                      value.name,
                      "' is not fed");
      tensor = feed != feeds.end() ? feed->second : initial_value(value);
      TRAINRT_REQUIRE((TensorType{tensor.dtype(), tensor.shape()} == value.type),
                      kInvalidArgument,
                      "'",
                      value.name,
                      "' is fed with ",
                      dtype_name(tensor.dtype()),
                      shape_string(tensor.shape()),
                      ", wanted ",
                      dtype_name(value.type.dtype),
                      shape_string(value.type.shape));
    }
    return tensor;
  };
  for (const Node& node : graph.nodes()) {
    std::vector<Tensor> inputs;
    for (const ValueId id : node.inputs) {
      inputs.push_back(read(id));
    }
    const std::vector<Tensor> outputs = evaluate_node(graph, node, inputs, options);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (node.outputs[i] != kNoValue) {
        values[static_cast<size_t>(node.outputs[i])] = outputs[i];
      }
    }
  }
  std::vector<Tensor> results;
  for (const ValueId id : fetches) {
    results.push_back(read(id));
  }
  return results;
}

}  // namespace trainrt
