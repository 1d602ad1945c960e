// The real cuDNN takes the graphs that the back end builds, and has engines for them within the
// workspace that a plan knows. What graphs compute is checked on the double (tests/cuda).
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>

#include "graph/op_def.h"
#include "runtime/load_cuda.h"
#include "tests/cuda_double/cuda_double.h"
#include "tests/cudnn/cuda_dnn_described.h"
#include "tests/support/device_case.h"

namespace trainrt::testing {
namespace {

struct Architecture {
  const char* name;
  cuda_dnn_described::Gpu gpu;
};

constexpr Architecture kArchitectures[] = {
    {"sm_80", {"NVIDIA A100-SXM4-80GB", 8, 108, 166912}},
    {"sm_90", {"NVIDIA H100 80GB HBM3", 9, 132, 232448}},
    {"sm_100", {"NVIDIA B200", 10, 148, 232448}},
    {"sm_120", {"NVIDIA RTX PRO 6000 Blackwell", 12, 188, 101376}}};

struct AttentionSizes {
  int64_t samples, heads, kv_heads, rows, width;
  bool causal, sequence_major;
};

std::ostream& operator<<(std::ostream& out, const Architecture& architecture) {
  return out << architecture.name;
}

class CudnnLibraryTest : public ::testing::TestWithParam<Architecture> {
 protected:
  void SetUp() override {
    cuda_double::reset({.compute_major = GetParam().gpu.major});
    cuda_dnn_described::describe(GetParam().gpu);
    device_ = cuda_module().make_device(0, {});
  }

  // Runs a node whose inputs are zeros of these types.
  void ask(const std::string& type, const Attributes& attributes, const TensorTypes& inputs) {
    NodeCase test_case;
    test_case.node.name = test_case.node.op_type = type;
    test_case.node.attributes = attributes;
    test_case.input_types = inputs;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const bool present = !inputs[i].shape.empty();
      test_case.present.push_back(present);
      test_case.node.inputs.push_back(present ? static_cast<ValueId>(i) : kNoValue);
      test_case.inputs.push_back(present ? Tensor(inputs[i].dtype, inputs[i].shape) : Tensor());
    }
    test_case.output_types = get_op(type).infer_types(
        {test_case.node, test_case.input_types, test_case.present, test_case.output_types});
    for (size_t i = 0; i < test_case.output_types.size(); ++i) {
      test_case.node.outputs.push_back(static_cast<ValueId>(inputs.size() + i));
    }
    run_on_device(test_case, *device_);
  }
  void expect_engine(const std::string& type,
                     const Attributes& attributes,
                     const TensorTypes& inputs) {
    const int64_t runs = cuda_dnn_described::num_runs();
    ask(type, attributes, inputs);
    EXPECT_GT(cuda_dnn_described::num_runs(), runs)
        << type << " runs without cuDNN. " << cuda_dnn_described::refusals();
  }

  void expect_attention(const AttentionSizes& s) {
    const auto shape = [&](int64_t heads) {
      return s.sequence_major ? Shape{s.samples, s.rows, heads, s.width}
                              : Shape{s.samples, heads, s.rows, s.width};
    };
    const TensorType q{DType::kBFloat16, shape(s.heads)}, k{DType::kBFloat16, shape(s.kv_heads)},
        lse{DType::kFloat32, {s.samples, s.heads, s.rows}};
    const int64_t major = s.sequence_major;
    const Attributes attributes = {
        {"scale", 0.125},
        {"causal", int64_t{s.causal}},
        {"sequence_major", std::vector<int64_t>{major, major, major, major}}};
    expect_engine("FusedAttention", attributes, {q, k, k});
    expect_engine("FusedAttentionGrad", attributes, {q, k, k, {}, q, lse, q});
  }

  std::unique_ptr<Device> device_;
};

TEST_P(CudnnLibraryTest, TakesTheAttentionOfGpt2) {
  expect_attention({1, 25, 25, 1024, 64, true, true});
}

TEST_P(CudnnLibraryTest, TakesTheAttentionOfBert) {
  expect_attention({2, 16, 16, 512, 64, false, false});
}

TEST_P(CudnnLibraryTest, TakesTheAttentionOfLlama) {
  expect_attention({1, 16, 4, 1024, 128, true, true});
}

TEST_P(CudnnLibraryTest, TakesAttentionOfOddLengths) {
  expect_attention({3, 2, 1, 37, 40, true, true});
}

TEST_P(CudnnLibraryTest, TakesTheConvolutionsOfResNet) {
  struct Case {
    Shape x, w, y;
    int64_t stride, pad;
  };
  for (const Case& c : {Case{{1, 224, 224, 3}, {64, 3, 7, 7}, {1, 112, 112, 64}, 2, 3},
                        Case{{1, 56, 56, 64}, {64, 64, 3, 3}, {1, 56, 56, 64}, 1, 1},
                        Case{{1, 56, 56, 256}, {512, 256, 1, 1}, {1, 28, 28, 512}, 2, 0}}) {
    const TensorType x{DType::kBFloat16, c.x}, w{DType::kBFloat16, c.w}, y{DType::kBFloat16, c.y};
    const Attributes attributes = {{"strides", Shape{c.stride, c.stride}},
                                   {"pads", Shape{c.pad, c.pad, c.pad, c.pad}},
                                   {"kernel_shape", Shape{c.w[2], c.w[3]}},
                                   {"layout", std::string("nhwc")}};
    Attributes with_size = attributes;
    with_size.set("input_spatial", Shape{c.x[1], c.x[2]});
    expect_engine("Conv", attributes, {x, w});
    expect_engine("ConvInputGrad", with_size, {y, w});
    expect_engine("ConvWeightGrad", attributes, {x, y});
  }
}

// As TensorFlow pads images of even sizes where the stride is 2.
TEST_P(CudnnLibraryTest, TakesUnequalPads) {
  const TensorType x{DType::kBFloat16, {2, 56, 56, 64}}, w{DType::kBFloat16, {64, 64, 3, 3}},
      y{DType::kBFloat16, {2, 28, 28, 64}};
  const Attributes attributes = {{"strides", Shape{2, 2}},
                                 {"pads", Shape{0, 0, 1, 1}},
                                 {"kernel_shape", Shape{3, 3}},
                                 {"layout", std::string("nhwc")}};
  Attributes with_size = attributes;
  with_size.set("input_spatial", Shape{56, 56});
  expect_engine("Conv", attributes, {x, w});
  expect_engine("ConvInputGrad", with_size, {y, w});
  expect_engine("ConvWeightGrad", attributes, {x, y});
}

// What the rules of ops/cudnn_graph leave is enough, for all three convolutions of a first layer,
// of an inner one and of a depthwise one.
TEST_P(CudnnLibraryTest, HasEnginesForConvolutionsThatKeepToTheRules) {
  struct Case {
    Shape x, w, y;
    int64_t stride, pad, group;
  };
  for (const Case& c : {Case{{2, 224, 224, 3}, {64, 3, 7, 7}, {2, 112, 112, 64}, 2, 3, 1},
                        Case{{2, 56, 56, 64}, {64, 64, 3, 3}, {2, 56, 56, 64}, 1, 1, 1},
                        Case{{2, 28, 28, 96}, {96, 1, 3, 3}, {2, 28, 28, 96}, 1, 1, 96}}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      const TensorType x{dtype, c.x}, w{dtype, c.w}, y{dtype, c.y};
      Attributes attributes = {{"strides", Shape{c.stride, c.stride}},
                               {"pads", Shape{c.pad, c.pad, c.pad, c.pad}},
                               {"kernel_shape", Shape{c.w[2], c.w[3]}},
                               {"group", c.group},
                               {"layout", std::string("nhwc")},
                               {"input_spatial", Shape{c.x[1], c.x[2]}}};
      for (const auto& [type, inputs] : {std::pair<std::string, TensorTypes>{"Conv", {x, w}},
                                         {"ConvInputGrad", {y, w}},
                                         {"ConvWeightGrad", {x, y}}}) {
        ask(type, attributes, inputs);
        const std::vector<cuda_dnn_described::Engine>& engines = cuda_dnn_described::proposed();
        const bool is_fp32 = dtype == DType::kFloat32;
        EXPECT_TRUE(std::any_of(engines.begin(),
                                engines.end(),
                                [&](const auto& engine) {
                                  return engine.is_deterministic() && !engine.adds_in_16_bits() &&
                                         !(is_fp32 && engine.rounds_fp32());
                                }))
            << type << " " << dtype_name(dtype) << shape_string(c.w);
      }
    }
  }
  for (const cuda_dnn_described::Engine& engine : cuda_dnn_described::run()) {
    EXPECT_FALSE(engine.adds_in_16_bits());
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures,
                         CudnnLibraryTest,
                         ::testing::ValuesIn(kArchitectures),
                         [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace trainrt::testing
