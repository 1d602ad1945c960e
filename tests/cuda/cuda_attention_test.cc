// Which attention goes to cuDNN's fused engines, and that it is the same attention.
#include <cublasLt.h>
#include <gtest/gtest.h>

#include "runtime/load_cuda.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/support/attention_case.h"
#include "tests/support/device_case.h"

namespace trainrt::testing {
namespace {

using Case = AttentionCase;

class CudaAttentionTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { cuda_double::reset(); }
  void TearDown() override { EXPECT_EQ(cuda_double::alive(), ""); }
};

TEST_P(CudaAttentionTest, ForwardAndGradientAreThoseOfTheCpu) {
  const Case& c = GetParam();
  const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
  const NodeCase forward = forward_case(c);
  const std::vector<Tensor> results = expect_results_of_cpu(forward, c, *device);
  EXPECT_EQ(cuda_double::num_graphs("log") > 0, c.fused);
  expect_results_of_cpu(backward_case(c, forward, results), c, *device);
  EXPECT_EQ(cuda_double::num_graphs("identity") > 0, c.fused);
}

INSTANTIATE_TEST_SUITE_P(
    Cases,
    CudaAttentionTest,
    ::testing::Values(Case{"causal", {2, 3, 20, 16}, {2, 3, 20, 16}, {2, 3, 20, 8}},
                      Case{"all_keys", {2, 2, 9, 8}, {2, 2, 13, 8}, {2, 2, 13, 24}, false},
                      Case{"as_projected",
                           {2, 20, 3, 16},
                           {2, 20, 3, 16},
                           {2, 20, 3, 16},
                           true,
                           {1, 1, 1, 1},
                           DType::kFloat16},
                      Case{"grouped", {2, 6, 12, 8}, {2, 2, 12, 8}, {2, 2, 12, 8}},
                      Case{"grouped_as_projected",
                           {1, 12, 4, 8},
                           {1, 12, 2, 8},
                           {1, 2, 12, 8},
                           true,
                           {1, 1, 0, 1}},
                      // Room for the gradient's sums of a few samples at a time.
                      Case{"in_parts",
                           {11, 2, 6, 8},
                           {11, 2, 6, 8},
                           {11, 2, 6, 8},
                           true,
                           {0, 0, 0, 0},
                           DType::kBFloat16,
                           4096},
                      Case{"odd_heads",
                           {2, 2, 9, 12},
                           {2, 2, 9, 12},
                           {2, 2, 9, 12},
                           true,
                           {0, 0, 0, 0},
                           DType::kBFloat16,
                           std::nullopt,
                           std::nullopt,
                           false},
                      Case{"masked",
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           false,
                           {0, 0, 0, 0},
                           DType::kBFloat16,
                           std::nullopt,
                           Shape{2, 1, 1, 9},
                           false},
                      Case{"hidden_altogether",
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           false,
                           {0, 0, 0, 0},
                           DType::kFloat16,
                           std::nullopt,
                           Shape{2, 1, 1, 9},
                           false,
                           true},
                      Case{"float32",
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           {2, 2, 9, 8},
                           true,
                           {0, 0, 0, 0},
                           DType::kFloat32,
                           std::nullopt,
                           std::nullopt,
                           false},
                      Case{.name = "opposed",
                           .q = {1, 2, 20, 64},
                           .k = {1, 2, 30, 64},
                           .v = {1, 2, 30, 64},
                           .causal = false,
                           .opposed = true}),
    [](const auto& row) { return row.param.name; });

// The fused gradient adds in any order, which deterministic runs must not.
TEST_F(CudaAttentionTest, DeterministicGradientsAreNotFused) {
  const Case c{"", {2, 2, 9, 8}, {2, 2, 9, 8}, {2, 2, 9, 8}};
  for (const bool deterministic : {true, false}) {
    DeviceOptions options;
    options.deterministic = deterministic;
    const std::unique_ptr<Device> device = cuda_module().make_device(0, options);
    const NodeCase forward = forward_case(c);
    run_on_device(backward_case(c, forward, run_on_device(forward, *device)), *device);
    EXPECT_EQ(cuda_double::num_graphs("identity") == 0, deterministic);
  }
}

// Hopper's engine lets keys past the end in, where exp(0 - lse) may be infinite.
TEST_F(CudaAttentionTest, GradientsThatHoppersEngineGetsWrongAreNotFused) {
  struct Row {
    int64_t sq, sk;
    bool causal, fused;
  };
  for (const int major : {8, 9}) {
    for (const Row& row : {Row{8, 64, false, false},
                           {8, 192, false, false},
                           {8, 64, true, true},
                           {72, 64, true, false},
                           {8, 128, false, true},
                           {8, 100, false, true},
                           {1, 128, false, false},
                           {1, 128, true, true}}) {
      cuda_double::reset({.compute_major = major});
      const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
      const Case c{"", {1, 1, row.sq, 8}, {1, 1, row.sk, 8}, {1, 1, row.sk, 8}, row.causal};
      const NodeCase forward = forward_case(c);
      const std::vector<Tensor> results = run_on_device(forward, *device);
      EXPECT_GT(cuda_double::num_graphs("log"), 0);
      run_on_device(backward_case(c, forward, results), *device);
      EXPECT_EQ(cuda_double::num_graphs("identity") > 0, row.fused || major != 9)
          << row.sq << " queries, " << row.sk << " keys, causal " << row.causal;
    }
  }
}

// Samples whose heads are together go through cuBLASLt as one batch; others share the softmax.
TEST_F(CudaAttentionTest, SmallSamplesRunTogether) {
  for (const bool projected : {false, true}) {
    for (const std::optional<int64_t> cap : {std::optional<int64_t>(), std::optional<int64_t>(1)}) {
      cuda_double::reset();
      const std::unique_ptr<Device> device = cuda_module().make_device(0, {});
      Case c{"masked", {64, 2, 9, 8}, {64, 2, 9, 8}, {64, 2, 9, 8}, false};
      c.mask = Shape{64, 1, 1, 9};
      if (projected) {
        c.q = c.k = c.v = {64, 9, 2, 8};
        c.sequence_major = {1, 1, 1, 1};
      }
      c.workspace_cap = cap;
      const NodeCase forward = forward_case(c);
      const std::vector<Tensor> results = expect_results_of_cpu(forward, c, *device);
      const int64_t apart = cap ? 64 * 2 : projected ? 64 : 1;  // sample and head, sample, all
      EXPECT_EQ(cuda_double::num_products(CUBLASLT_EPILOGUE_DEFAULT), 2 * apart);
      EXPECT_EQ(cuda_double::num_launches(), cap ? 64 * 2 : 1);
      expect_results_of_cpu(backward_case(c, forward, results), c, *device);
      EXPECT_EQ(cuda_double::num_products(CUBLASLT_EPILOGUE_DEFAULT), 7 * apart);
    }
  }
}

}  // namespace
}  // namespace trainrt::testing
