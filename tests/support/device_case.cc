#include "tests/support/device_case.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "graph/op_def.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {

namespace {

bool has_dtype_attribute(const OpExample& example) {
  return example.attributes.has("to") || example.attributes.has("dtype");
}

void expect_near(const std::vector<Tensor>& actual,
                 const std::vector<Tensor>& expected,
                 DType floats) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const DType dtype = expected[i].dtype();
    EXPECT_TRUE(tensors_near(
        actual[i].cast(dtype), expected[i], is_floating(dtype) ? kernel_tolerance(floats) : 0))
        << "output " << i;
  }
}

// Against float32 from the same rounded inputs.
void expect_narrow_results(const OpDef& op, const OpExample& example, DType dtype, Device& device) {
  NodeCase narrow;
  try {
    narrow = make_case(op, example, dtype);
    run_case(narrow);
  } catch (const Error&) {
    return;  // the operator refuses these types on the CPU, too
  }
  NodeCase wide = make_case(op, example);
  for (size_t i = 0; i < wide.inputs.size(); ++i) {
    if (wide.present[i] && wide.input_types[i].dtype == DType::kFloat32) {
      wide.inputs[i] = narrow.inputs[i].cast(DType::kFloat32);
    }
  }
  expect_near(run_on_device(narrow, device), run_case(wide), dtype);
}

// A gradient's example holds results of the forward operator, rounded to float32: kernels that
// derive the same number from different ones of them agree to that rounding only.
double tolerance(const OpExample& example, DType dtype) {
  const bool rounded =
      std::any_of(example.values.begin(), example.values.end(), [](const Tensor& value) {
        return value.defined() && value.dtype() == DType::kFloat32;
      });
  return dtype == DType::kFloat64 && rounded ? 1e-7 : kernel_tolerance(dtype);
}

}  // namespace

bool is_communication_op(const OpDef& op) {
  return op.effect && !op.reference_kernel && !op.cpu_kernel && !op.cpu_factory;
}

std::vector<Tensor> run_on_device(const NodeCase& test_case,
                                  Device& device,
                                  std::optional<int64_t> workspace_cap,
                                  bool replayed) {
  const OpDef& op = get_op(test_case.node.op_type);
  DeviceSpec spec = device.context().spec();
  spec.workspace_cap = workspace_cap.value_or(spec.workspace_cap);
  std::vector<std::unique_ptr<DeviceBuffer>> buffers;
  const auto room = [&](int64_t bytes) {
    buffers.push_back(device.allocate(bytes));
    return buffers.back()->data();
  };
  std::vector<TensorRef> inputs(test_case.inputs.size()), outputs;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (test_case.present[i]) {
      const Tensor& tensor = test_case.inputs[i];
      inputs[i] = {room(tensor.bytes()), &test_case.input_types[i]};
    }
  }
  const auto write_inputs = [&] {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (test_case.present[i]) {
        device.copy_to_device(
            inputs[i].data, test_case.inputs[i].raw(), test_case.inputs[i].bytes());
      }
    }
  };
  for (size_t i = 0; i < test_case.output_types.size(); ++i) {
    const TensorType& type = test_case.output_types[i];
    const auto aliased =
        std::find_if(op.inplace.begin(), op.inplace.end(), [&](const Inplace& inplace) {
          return inplace.always && inplace.output == static_cast<int>(i);
        });
    outputs.push_back({aliased != op.inplace.end()
                           ? inputs.at(static_cast<size_t>(aliased->input)).data
                           : room(type.bytes()),
                       &type});
  }
  const OpContext context = test_case.context();
  const int64_t workspace_size = workspace_bytes(context, spec);
  std::byte* workspace = workspace_size > 0 ? room(workspace_size) : nullptr;
  const StepContext step{.seed = 7, .step = 3};
  KernelContext kernel_context(test_case.node,
                               inputs,
                               outputs,
                               {workspace, static_cast<size_t>(workspace_size)},
                               device.context(),
                               step);
  const Kernel kernel = make_kernel(context, spec);
  write_inputs();
  kernel(kernel_context);
  std::unique_ptr<RecordedWork> recorded;
  if (replayed) {
    for (size_t i = 0; i < outputs.size(); ++i) {
      device.fill_zero(outputs[i].data, outputs[i].type->bytes());
    }
    write_inputs();
    recorded = device.record([&] { kernel(kernel_context); });
    device.replay(*recorded);
  }
  std::vector<Tensor> results;
  for (size_t i = 0; i < outputs.size(); ++i) {
    results.emplace_back(outputs[i].type->dtype, outputs[i].type->shape);
    device.copy_to_host(results.back().raw(), outputs[i].data, results.back().bytes());
  }
  return results;
}

void expect_reference_results(const OpDef& op, Device& device) {
  for (const OpExample& example : op.examples) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
      if (dtype == DType::kFloat64 && has_dtype_attribute(example)) {
        continue;
      }
      SCOPED_TRACE(concat("example '", example.name, "', ", dtype_name(dtype)));
      const NodeCase test_case = make_case(op, example, dtype);
      const std::vector<Tensor> expected = run_case(test_case);
      for (const bool replayed : {false, true}) {
        if (replayed && !device.records()) {
          continue;
        }
        const std::vector<Tensor> actual = run_on_device(test_case, device, std::nullopt, replayed);
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(tensors_near(actual[i], expected[i], tolerance(example, expected[i].dtype())))
              << "output " << i << (replayed ? ", replayed" : "");
        }
      }
    }
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      if (!has_dtype_attribute(example)) {
        SCOPED_TRACE(concat("example '", example.name, "', ", dtype_name(dtype)));
        expect_narrow_results(op, example, dtype, device);
      }
    }
  }
}

}  // namespace trainrt::testing
