// What cuDNN or cuBLASLt refuses, or fails at, is done by their next engine, and by a kernel
// without them when none is left.
#include <cublasLt.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "graph/op_def.h"
#include "tests/cuda/cuda_double_device.h"
#include "tests/support/device_case.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

using cuda_double::Fault;

class CudaFallbackTest : public ::testing::Test {
 protected:
  // Runs one of the operator's examples and answers with all that was logged.
  std::string run(const std::string& type, DType dtype = DType::kFloat32, size_t example = 0) {
    const OpDef& op = get_op(type);
    return run(make_case(op, op.examples.at(example), dtype));
  }
  std::string run(const NodeCase& test_case) {
    const DType dtype = test_case.output_types.at(0).dtype;
    const std::vector<Tensor> expected = run_case(test_case);
    ::testing::internal::CaptureStderr();
    const std::vector<Tensor> actual = run_on_device(test_case, **device_, std::nullopt, true);
    const std::string logged = ::testing::internal::GetCapturedStderr();
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(tensors_near(actual[i], expected[i], kernel_tolerance(dtype)))
          << test_case.node.op_type;
    }
    return logged;
  }

  void set_device(const DeviceOptions& options) {
    device_.reset();
    device_ = std::make_unique<DoubleDevice>(options);
  }
  static void set_faults(const std::vector<std::string>& engines, Fault fault) {
    for (const std::string& engine : engines) {
      cuda_double::set_fault(engine, fault);
    }
  }

  std::unique_ptr<DoubleDevice> device_ = std::make_unique<DoubleDevice>();
};

const std::vector<std::pair<std::string, std::string>> kConvolutions = {
    {"Conv", "conv_forward"}, {"ConvInputGrad", "conv_data"}, {"ConvWeightGrad", "conv_filter"}};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(CudaFallbackTest, CudnnsOtherEnginesRunWhatOneRefuses) {
  for (const Fault fault : {Fault::kRefuses, Fault::kWantsMore, Fault::kFails}) {
    for (const std::vector<std::string>& engines :
         {std::vector<std::string>{"A0"}, {"A1"}, {"A0", "A1"}}) {
      for (const bool deterministic : {false, true}) {
        DeviceOptions options;
        options.deterministic = deterministic;
        options.tf32 = true;
        set_device(options);
        set_faults(engines, fault);
        for (const auto& [type, graph] : kConvolutions) {
          EXPECT_EQ(run(type), "");
          EXPECT_GT(cuda_double::num_graphs(graph), 0) << type;
        }
      }
    }
  }
}

// The engine that the double proposes first for this adds in 16 bits, where 2048 + 1 is 2048.
TEST_F(CudaFallbackTest, NoEngineThatAddsIn16BitsRuns) {
  OpExample example;
  example.name = "ones";
  example.attributes = {{"kernel_shape", Shape{1, 1}}};
  example.inputs = {{DType::kFloat32, {1, 1, 64, 64}}, {DType::kFloat32, {1, 1, 64, 64}}};
  NodeCase test_case = make_case(get_op("ConvWeightGrad"), example, DType::kFloat16);
  for (Tensor& input : test_case.inputs) {
    std::fill_n(input.data<Float16>(), input.num_elements(), Float16(1.0f));
  }
  const std::vector<Tensor> actual = run_on_device(test_case, **device_);
  EXPECT_EQ(static_cast<float>(actual[0].data<Float16>()[0]), 4096);
  EXPECT_GT(cuda_double::num_graphs("conv_filter"), 0);
}

// What is left to a slow kernel is said, and unequal pads are not.
TEST_F(CudaFallbackTest, CudnnRunsConvolutionsOfUnequalPads) {
  for (const auto& [type, graph] : kConvolutions) {
    OpExample example;
    example.name = "unequal";
    example.attributes = {{"kernel_shape", Shape{3, 3}},
                          {"pads", Shape{0, 0, 1, 2}},
                          {"strides", Shape{2, 2}},
                          {"input_spatial", Shape{6, 6}}};
    const TensorType x{DType::kFloat32, {2, 3, 6, 6}}, w{DType::kFloat32, {4, 3, 3, 3}},
        y{DType::kFloat32, {2, 4, 3, 3}};
    example.inputs = {type == "ConvInputGrad" ? y : x, type == "ConvWeightGrad" ? y : w};
    for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
      set_device({});
      const NodeCase test_case = make_case(get_op(type), example, dtype);
      EXPECT_EQ(has(run(test_case), "cuDNN does not take float64"), dtype == DType::kFloat64);
      EXPECT_EQ(cuda_double::num_graphs(graph) > 0, dtype == DType::kFloat32) << type;
    }
  }
}

// Whoever is asked next would fail in the same way.
TEST_F(CudaFallbackTest, AFailureOfTheDeviceIsNoRefusal) {
  set_faults({"A0", "device"}, Fault::kFails);
  const NodeCase test_case = make_case(get_op("Conv"), get_op("Conv").examples.at(0));
  try {
    run_on_device(test_case, **device_);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDevice);
    EXPECT_TRUE(has(error.message(), "cudaStreamQuery")) << error.message();
  }
  EXPECT_EQ(cuda_double::num_graphs("conv_forward"), 0);
  set_faults({"device"}, Fault::kNone);
}

TEST_F(CudaFallbackTest, AKernelRunsConvolutionsWhenCudnnHasNone) {
  for (const Fault fault : {Fault::kRefuses, Fault::kWantsMore, Fault::kFails}) {
    set_device({});
    set_faults({"A0", "A1", "F0"}, fault);
    for (const auto& [type, graph] : kConvolutions) {
      const std::string logged = run(type);
      EXPECT_EQ(cuda_double::num_graphs(graph), 0) << type;
      EXPECT_TRUE(has(logged, type + " float32 x[")) << logged;  // what was asked for
      EXPECT_TRUE(has(logged, "A1: ") && has(logged, "F0: ")) << logged;
      EXPECT_TRUE(has(logged, fault == Fault::kWantsMore ? "bytes of workspace" : "reason"))
          << logged;
    }
  }
}

TEST_F(CudaFallbackTest, AKernelRunsConvolutionsWhoseGraphCudnnRefuses) {
  cuda_double::set_fault("graph", Fault::kRefuses);
  for (const auto& [type, graph] : kConvolutions) {
    EXPECT_TRUE(has(run(type), "its graph: "));
    EXPECT_EQ(cuda_double::num_graphs(graph), 0) << type;
  }
}

TEST_F(CudaFallbackTest, CublasLtsNextAlgorithmRunsWhatOneRefuses) {
  for (const Fault fault : {Fault::kRefuses, Fault::kFails}) {
    cuda_double::set_fault("L0", fault);
    for (const std::string type : {"MatMul", "MatMulAdd", "MatMulReluGrad"}) {
      EXPECT_EQ(run(type), "");
    }
    EXPECT_GT(cuda_double::num_products(CUBLASLT_EPILOGUE_DRELU), 0);
  }
}

TEST_F(CudaFallbackTest, AKernelMultipliesWhenCublasLtHasNoAlgorithm) {
  for (const Fault fault : {Fault::kRefuses, Fault::kFails}) {
    set_faults({"L0", "L1"}, fault);
    for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
      for (const std::string type :
           {"MatMul", "MatMulAdd", "MatMulReluGrad", "MatMulWeightBiasGrad", "FusedAttention"}) {
        const std::string logged = run(type, dtype);
        EXPECT_TRUE(has(logged, "(" + type + "): a slow kernel runs")) << logged;
        EXPECT_TRUE(has(logged, dtype_name(dtype))) << logged;
      }
    }
    EXPECT_EQ(cuda_double::num_products(CUBLASLT_EPILOGUE_DEFAULT), 0);
  }
}

// cuBLASLt wants rows that are aligned, of what an epilogue reads or writes.
TEST_F(CudaFallbackTest, AProductWhoseEpilogueCublasLtRefusesSaysSoOnce) {
  for (const std::string type : {"MatMulReluGrad", "MatMulWeightBiasGrad"}) {
    const std::vector<OpExample>& examples = get_op(type).examples;
    const auto narrow =
        std::find_if(examples.begin(), examples.end(), [](const OpExample& example) {
          return example.name.starts_with("one_");
        });
    ASSERT_NE(narrow, examples.end());
    const std::string logged =
        run(type, DType::kFloat32, static_cast<size_t>(narrow - examples.begin()));
    const std::string said = "(" + type + "): a product and a kernel run";
    EXPECT_TRUE(has(logged, said)) << logged;
    EXPECT_EQ(logged.find(said), logged.rfind(said)) << logged;
  }
}

}  // namespace
}  // namespace trainrt::testing
