#include "tests/support/op_example.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <memory>
#include <random>

#include "graph/graph_builder.h"
#include "graph/random.h"

namespace trainrt::testing {

namespace {

class BlockContext : public DeviceContext {
 public:
  explicit BlockContext(const RunOptions& options) : reverse_(options.reverse_blocks) {
    spec_.reference_kernels = options.reference;
    spec_.threads = options.threads;
  }
  const DeviceSpec& spec() const override { return spec_; }
  void parallel_for(int64_t n,
                    int64_t grain,
                    const std::function<void(int64_t, int64_t)>& fn) override {
    const int64_t blocks = (n + grain - 1) / grain;
    for (int64_t i = 0; i < blocks; ++i) {
      const int64_t block = reverse_ ? blocks - 1 - i : i;
      fn(block * grain, std::min(n, (block + 1) * grain));
    }
  }
  void* stream() override { return nullptr; }

 private:
  DeviceSpec spec_;
  bool reverse_;
};

Tensor draw(const TensorType& type, const OpExample& example, std::mt19937_64& generator) {
  Tensor tensor(DType::kFloat64, type.shape);
  std::uniform_real_distribution<double> uniform(example.low, example.high);
  std::uniform_int_distribution<int> small(0, type.dtype == DType::kBool ? 1 : 4);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    tensor.data<double>()[i] = is_floating(type.dtype) ? uniform(generator) : small(generator);
  }
  return tensor.cast(type.dtype);
}

// Inputs that are float32 beside 16-bit ones, too.
bool is_statistic(const std::string& op, size_t input) {
  if (op == "FusedAttention" || op == "FusedAttentionGrad") {
    return input == 3 || input == 5 || input == 7;  // mask, lse, dlse
  }
  return input >= 3 && (op == "LayerNormGrad" || op == "RMSNormGrad" || op == "GroupNormGrad");
}

void poison(std::byte* data, int64_t bytes) {
  std::memset(data, 0xff, static_cast<size_t>(bytes));
}

}  // namespace

std::string test_name(const std::string& op) {
  std::string name = op;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return name;
}

NodeCase make_case(const OpDef& op, const OpExample& example, DType floats) {
  std::mt19937_64 generator(hash_name(op.name + "/" + example.name));
  NodeCase result;
  result.node.name = example.name.empty() ? "example" : example.name;
  result.node.op_type = op.name;
  result.node.attributes = example.attributes;
  for (size_t i = 0; i < example.inputs.size(); ++i) {
    TensorType type = example.inputs[i];
    const bool absent =
        std::find(example.absent.begin(), example.absent.end(), static_cast<int>(i)) !=
        example.absent.end();
    const bool given = i < example.values.size() && example.values[i].defined();
    Tensor value;
    if (!absent) {
      value = given ? example.values[i] : draw(type, example, generator);
      const bool stays = dtype_bytes(floats) == 2 && is_statistic(op.name, i);
      if (type.dtype == DType::kFloat32 && !stays) {
        type.dtype = floats;
        value = value.cast(floats);
      }
      TRAINRT_CHECK(value.dtype() == type.dtype && value.shape() == type.shape,
                    op.name,
                    " '",
                    example.name,
                    "': value ",
                    i,
                    " has not the type of input ",
                    i);
    }
    result.node.inputs.push_back(absent ? kNoValue : static_cast<ValueId>(i));
    result.input_types.push_back(type);
    result.present.push_back(!absent);
    result.inputs.push_back(value);
  }
  result.output_types = op.infer_types(result.context());
  for (size_t i = 0; i < result.output_types.size(); ++i) {
    result.node.outputs.push_back(static_cast<ValueId>(example.inputs.size() + i));
  }
  return result;
}

std::vector<Tensor> run_case(const NodeCase& test_case, const RunOptions& options) {
  const OpDef& op = get_op(test_case.node.op_type);
  BlockContext device(options);
  std::vector<Tensor> inputs;
  for (const Tensor& input : test_case.inputs) {
    inputs.push_back(input.defined() ? input.clone() : input);
  }
  std::vector<Tensor> outputs;
  for (size_t i = 0; i < test_case.output_types.size(); ++i) {
    if (!test_case.has_output(i)) {
      outputs.emplace_back();
      continue;
    }
    outputs.emplace_back(test_case.output_types[i].dtype, test_case.output_types[i].shape);
    poison(outputs.back().raw(), outputs.back().bytes());
  }
  const auto alias = [&](const Inplace& inplace) {
    const size_t i = static_cast<size_t>(inplace.output);
    const auto owner = std::make_shared<Tensor>(inputs.at(static_cast<size_t>(inplace.input)));
    outputs.at(i) = Tensor(
        test_case.output_types[i].dtype, test_case.output_types[i].shape, owner, owner->raw());
  };
  for (const Inplace& inplace : op.inplace) {
    if (inplace.always) {
      alias(inplace);
    }
  }
  if (options.alias != nullptr) {
    alias(*options.alias);
  }
  std::vector<TensorRef> input_refs, output_refs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    input_refs.push_back(
        test_case.present[i] ? TensorRef{inputs[i].raw(), &test_case.input_types[i]} : TensorRef{});
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    output_refs.push_back(test_case.has_output(i)
                              ? TensorRef{outputs[i].raw(), &test_case.output_types[i]}
                              : TensorRef{});
  }
  const OpContext context = test_case.context();
  const int64_t workspace_size = workspace_bytes(context, device.spec());
  Tensor workspace(DType::kUInt8, {workspace_size + 64});
  poison(workspace.raw(), workspace.bytes());
  const size_t misaligned = reinterpret_cast<uintptr_t>(workspace.raw()) % 64;
  std::byte* aligned = workspace.raw() + (misaligned == 0 ? 0 : 64 - misaligned);
  const StepContext step{.seed = 7, .step = 3};
  KernelContext kernel_context(test_case.node,
                               input_refs,
                               output_refs,
                               {aligned, static_cast<size_t>(workspace_size)},
                               device,
                               step);
  make_kernel(context, device.spec())(kernel_context);
  return outputs;
}

GraphCase make_graph(const NodeCase& test_case, const OpExample& example) {
  GraphCase result;
  GraphBuilder builder(result.graph);
  std::vector<ValueId> inputs;
  for (size_t i = 0; i < test_case.inputs.size(); ++i) {
    if (!test_case.present[i]) {
      inputs.push_back(kNoValue);
      continue;
    }
    const bool listed = std::find(example.check_gradient.begin(),
                                  example.check_gradient.end(),
                                  static_cast<int>(i)) != example.check_gradient.end();
    const bool given = i < example.values.size() && example.values[i].defined();
    const bool checked = is_floating(test_case.input_types[i].dtype) &&
                         (listed || (example.check_gradient.empty() && !given));
    const std::string name = concat("input", i);
    if (checked) {
      Value value;
      value.name = name;
      value.type = test_case.input_types[i];
      value.kind = ValueKind::kParameter;
      inputs.push_back(result.graph.add_value(value));
      result.checked.push_back(inputs.back());
      result.feeds[name] = test_case.inputs[i];
    } else {
      inputs.push_back(result.graph.add_constant(name, test_case.inputs[i]));
    }
  }
  builder.node(test_case.node.op_type, inputs, test_case.node.attributes, test_case.node.name);
  return result;
}

}  // namespace trainrt::testing
