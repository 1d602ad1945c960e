// On a real GPU: every operator against its reference kernel, and whole runs against the CPU.
#include <gmock/gmock.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "graph/op_def.h"
#include "runtime/load_cuda.h"
#include "tests/support/attention_case.h"
#include "tests/support/device_case.h"
#include "tests/support/elementwise_steps.h"
#include "tests/support/run_program.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

class GpuOperatorTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GpuOperatorTest, EqualsTheReferenceKernel) {
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  const OpDef& op = get_op(GetParam());
  if (is_communication_op(op)) {
    return;
  }
  ASSERT_TRUE(has_kernel(op.name, Backend::kCuda));
  expect_reference_results(op, *device);
}

class GpuStepTest : public ::testing::TestWithParam<std::string> {};

// Fused kernels, compiled here and now by NVRTC.
TEST_P(GpuStepTest, EqualsTheReferenceKernelAndSingleKernels) {
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  const OpDef fused = as_step(GetParam());
  expect_reference_results(fused, *device);
  expect_bits_of_single_kernels(fused, *device);
}

INSTANTIATE_TEST_SUITE_P(Elementwise,
                         GpuStepTest,
                         ::testing::ValuesIn(elementwise_ops()),
                         [](const auto& row) { return test_name(row.param); });

// Lengths at which cuDNN has been wrong (ops/attention_scratch.h), and scores that show it.
TEST(GpuAttentionTest, GradientsOfVeryNegativeScoresAreThoseOfTheCpu) {
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  for (const auto& [sq, sk] :
       {std::pair<int64_t, int64_t>{64, 64}, {192, 192}, {100, 100}, {128, 128}, {1, 128}}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      AttentionCase c{concat(sq, " x ", sk), {2, 2, sq, 64}, {2, 2, sk, 64}, {2, 2, sk, 64}};
      c.causal = false;
      c.dtype = dtype;
      c.opposed = true;
      const NodeCase forward = forward_case(c);
      const std::vector<Tensor> results = expect_results_of_cpu(forward, c, *device);
      expect_results_of_cpu(backward_case(c, forward, results), c, *device);
    }
  }
}

// cuDNN's plans for one image size must not disturb those for another.
TEST(GpuConvolutionTest, DepthwiseConvolutionsOfSeveralSizesRunInTurn) {
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  for (int round = 0; round < 2; ++round) {
    for (const int64_t size : {7, 14, 28, 56}) {
      const TensorType image{DType::kFloat32, {2, size, size, 32}};
      const TensorType weight{DType::kFloat32, {32, 1, 3, 3}};
      OpExample example;
      example.name = concat(size);
      example.attributes = {{"group", int64_t{32}},
                            {"kernel_shape", Shape{3, 3}},
                            {"pads", Shape{1, 1, 1, 1}},
                            {"layout", std::string("nhwc")},
                            {"input_spatial", Shape{size, size}}};
      for (const std::string type : {"Conv", "ConvInputGrad", "ConvWeightGrad"}) {
        example.inputs = {image, type == "ConvWeightGrad" ? image : weight};
        const NodeCase narrow = make_case(get_op(type), example, DType::kFloat16);
        const std::vector<Tensor> actual = run_on_device(narrow, *device);
        EXPECT_TRUE(
            tensors_near(actual[0], run_case(narrow).at(0), kernel_tolerance(DType::kFloat16)))
            << type << " " << size << " round " << round;
      }
    }
  }
}

struct Family {
  std::string name;
  std::vector<std::string> sizes;
  // Compared with the CPU. BatchNorm over few values magnifies float32's rounding from step to
  // step: between float32 and float64 on one CPU, ResNet's losses differ by 4e-7, 7e-6, 3e-5, 2e-4,
  // 2e-3.
  size_t steps = 5;
};

class GpuRun : public ::testing::Test {
 protected:
  // Losses of five steps.
  std::vector<double> train(const Family& family,
                            const std::string& device,
                            const std::vector<std::string>& more) {
    const std::string model = folder_.file("model.onnx"), metrics = folder_.file("m.jsonl");
    std::vector<std::string> write = {"model", family.name, "-o", model};
    write.insert(write.end(), family.sizes.begin(), family.sizes.end());
    EXPECT_EQ(run_trainrt(write).exit_code, 0);
    std::vector<std::string> run = {"run",
                                    model,
                                    "--devices",
                                    device,
                                    "--steps",
                                    "5",
                                    "--batch-size",
                                    "8",
                                    "--metrics",
                                    metrics};
    run.insert(run.end(), more.begin(), more.end());
    const ProgramResult result = run_trainrt(run);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::vector<double> losses;
    std::istringstream lines(file_text(metrics));
    for (std::string line; std::getline(lines, line);) {
      losses.push_back(nlohmann::json::parse(line).at("loss"));
    }
    return losses;
  }
  static void expect_near(const std::vector<double>& actual,
                          const std::vector<double>& expected,
                          double tolerance,
                          size_t steps = 5) {
    ASSERT_EQ(expected.size(), 5u);
    ASSERT_EQ(actual.size(), 5u);
    for (size_t i = 0; i < steps; ++i) {
      EXPECT_NEAR(actual[i], expected[i], tolerance * std::fabs(expected[i])) << i;
    }
  }
  TemporaryFolder folder_;
};

class GpuFamilyTest : public GpuRun, public ::testing::WithParamInterface<Family> {};

TEST_P(GpuFamilyTest, TrainsAsOnTheCpu) {
  const std::vector<std::string> fp32 = {"--precision", "fp32"};
  const std::vector<double> cpu = train(GetParam(), "cpu", fp32);
  expect_near(train(GetParam(), "cuda:0", fp32), cpu, 1e-4, GetParam().steps);
}

TEST_P(GpuFamilyTest, DeterministicRunsHaveEqualBits) {
  const std::vector<std::string> flags = {"--precision", "fp32", "--deterministic"};
  EXPECT_EQ(train(GetParam(), "cuda:0", flags), train(GetParam(), "cuda:0", flags));
}

const std::vector<std::string> kSmallText = {
    "--layers", "2", "--hidden", "256", "--heads", "4", "--seq", "128", "--vocab", "1000"};

// cuDNN's fused engines take the attention of these.
TEST_F(GpuRun, FusedAttentionTrainsAsOnTheCpu) {
  const Family families[] = {{"gpt2", kSmallText},
                             {"llama", kSmallText},
                             {"vit", {"--layers", "2", "--hidden", "256", "--heads", "4"}}};
  for (const Family& sizes : families) {
    SCOPED_TRACE(sizes.name);
    for (const std::string precision : {"bf16", "fp16"}) {
      SCOPED_TRACE(precision);
      const std::vector<std::string> low = {"--precision", precision};
      expect_near(train(sizes, "cuda:0", low), train(sizes, "cpu", low), 1e-2);
    }
  }
}

TEST_F(GpuRun, DeterministicRunsHaveEqualBits) {
  const Family gpt{"gpt2", kSmallText};
  const std::vector<std::string> flags = {"--precision", "bf16", "--deterministic"};
  EXPECT_EQ(train(gpt, "cuda:0", flags), train(gpt, "cuda:0", flags));
}

INSTANTIATE_TEST_SUITE_P(
    Families,
    GpuFamilyTest,
    ::testing::Values(Family{"mlp", {}},
                      Family{"cnn", {}},
                      Family{"resnet", {"--layers", "18", "--image", "64", "--classes", "10"}, 3},
                      Family{"vit", {"--layers", "2", "--hidden", "64", "--heads", "4"}},
                      Family{"gpt2", {"--layers", "2", "--hidden", "64", "--heads", "4"}},
                      Family{"llama", {"--layers", "2", "--hidden", "64", "--heads", "4"}},
                      Family{"lstm", {"--hidden", "32"}}),
    [](const auto& family) { return family.param.name; });

struct Split {
  std::string name;
  std::vector<std::string> pins;
};

class MultiGpuTest : public GpuRun, public ::testing::WithParamInterface<Split> {};

TEST_P(MultiGpuTest, TwoGpusTrainAsOne) {
  if (cuda_module().devices().size() < 2) {
    GTEST_SKIP() << "this machine has one GPU";
  }
  const Family gpt{"gpt2", {"--layers", "4", "--hidden", "256", "--heads", "4", "--seq", "64"}};
  std::vector<std::string> flags = {"--precision", "fp32", "--micro-batch-size", "2"};
  const std::vector<double> one = train(gpt, "cuda:0", flags);
  flags.insert(flags.end(), GetParam().pins.begin(), GetParam().pins.end());
  expect_near(train(gpt, "cuda:0,1", flags), one, 1e-5);
}

INSTANTIATE_TEST_SUITE_P(
    Splits,
    MultiGpuTest,
    ::testing::Values(Split{"data", {"--dp", "2"}},
                      Split{"zero", {"--dp", "2", "--zero", "3"}},
                      Split{"tensor", {"--tp", "2"}},
                      Split{"stages", {"--pp", "2", "--schedule", "1f1b"}},
                      Split{"zero_bubble", {"--pp", "2", "--schedule", "zb-h1"}},
                      Split{"interleaved", {"--pp", "2", "--virtual-stages", "2"}}),
    [](const auto& row) { return row.param.name; });

INSTANTIATE_TEST_SUITE_P(Registry,
                         GpuOperatorTest,
                         ::testing::ValuesIn(op_names()),
                         [](const auto& row) { return test_name(row.param); });

}  // namespace
}  // namespace trainrt::testing
