// Every operator's CUDA kernel, on the double, against its reference kernel on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "graph/op_def.h"
#include "tests/cuda/cuda_double_device.h"
#include "tests/support/device_case.h"
#include "tests/support/empty_case.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

class CudaOperatorTest : public ::testing::TestWithParam<std::string> {
 protected:
  DoubleDevice device_;
};

TEST_P(CudaOperatorTest, EqualsTheReferenceKernel) {
  const OpDef& op = get_op(GetParam());
  if (is_communication_op(op)) {
    return;
  }
  ASSERT_TRUE(has_kernel(op.name, Backend::kCuda));
  expect_reference_results(op, *device_);
}

TEST_P(CudaOperatorTest, TakesTensorsWithoutElements) {
  const OpDef& op = get_op(GetParam());
  // No rows have no place for one, which nobody asks StoreRow for.
  if (is_communication_op(op) || op.name == "StoreRow") {
    return;
  }
  for (const OpExample& example : op.examples) {
    for_each_empty_case(op, example, [&](const NodeCase& test_case) {
      // The attention that the gradient is given was made of queries with elements.
      if (op.name == "FusedAttentionGrad" && test_case.input_types[0].shape.back() == 0) {
        return;
      }
      const std::vector<Tensor> expected = run_case(test_case);
      const std::vector<Tensor> actual = run_on_device(test_case, *device_);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_TRUE(tensors_near(actual[i], expected[i], kernel_tolerance(expected[i].dtype())))
            << "output " << i;
      }
    });
  }
}

// As many of `classes` as there are items, and some that are ignored.
Tensor labels_of(int64_t items, int64_t classes) {
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < items; ++i) {
    labels.push_back(i % 7 == 3 ? -100 : i * i % classes);
  }
  return Tensor::from(labels, {items});
}

// Sums over more than a block of items or positions are made in two steps.
TEST(CudaOperatorSizesTest, SumsOfManyBlocksEqualTheReferenceKernel) {
  DoubleDevice device;
  constexpr int64_t kItems = 9000, kClasses = 5;
  const Attributes ignoring = {{"axis", int64_t{-1}}, {"ignore_index", int64_t{-100}}};
  const TensorType labels{DType::kInt64, {kItems}}, numbers{DType::kFloat32, {kItems}},
      scores{DType::kFloat32, {kItems, kClasses}};
  const auto expect_equal = [&](const std::string& name, const OpExample& example) {
    SCOPED_TRACE(name);
    const NodeCase test_case = make_case(get_op(name), example, DType::kFloat64);
    const std::vector<Tensor> expected = run_case(test_case);
    EXPECT_TRUE(tensors_near(run_on_device(test_case, *device).at(0), expected.at(0), 1e-10));
  };
  const Tensor classes = labels_of(kItems, kClasses);
  expect_equal("ItemCount",
               {.name = "many", .attributes = ignoring, .inputs = {labels}, .values = {classes}});
  expect_equal("CorrectCount",
               {.name = "many",
                .attributes = ignoring,
                .inputs = {labels, labels},
                .values = {labels_of(kItems, 3), classes}});
  expect_equal("NegativeLogLikelihoodLoss",
               {.name = "many",
                .attributes = ignoring,
                .inputs = {scores, labels},
                .values = {{}, classes}});
  expect_equal("SoftmaxCrossEntropyLoss",
               {.name = "many",
                .attributes = ignoring,
                .inputs = {scores, labels, numbers, numbers},
                .values = {{}, classes},
                .low = 1,
                .high = 2});
  expect_equal("ElementLoss",
               {.name = "many",
                .attributes = {{"kind", std::string("squared")}},
                .inputs = {{DType::kFloat32, {40000}}, {DType::kFloat32, {40000}}}});
  for (const std::string name : {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceLogSumExp"}) {
    const auto reduction = [](const Shape& shape, const std::vector<int64_t>& axes) {
      return OpExample{
          .name = "many", .attributes = {{"axes", axes}}, .inputs = {{DType::kFloat32, shape}}};
    };
    expect_equal(name, reduction({3, 40000}, {1}));
    expect_equal(name, reduction({5000, 40}, {0}));
    expect_equal(name, reduction({150, 3, 150}, {0, 2}));
  }
  // Few rows, each named by many positions; and places that updates meet at.
  Tensor rows = labels_of(kItems, 3);
  std::replace(rows.data<int64_t>(), rows.data<int64_t>() + kItems, int64_t{-100}, int64_t{1});
  expect_equal("GatherGrad",
               {.name = "many",
                .attributes = {{"axis", int64_t{0}}, {"shape", Shape{3, 4}}},
                .inputs = {labels, {DType::kFloat32, {kItems, 4}}},
                .values = {rows, {}}});
  expect_equal("ScatterElements",
               {.name = "many",
                .attributes = {{"axis", int64_t{0}}, {"reduction", std::string("add")}},
                .inputs = {{DType::kFloat32, {3}}, labels, numbers},
                .values = {{}, rows, {}}});
}

// A thread per column would walk down all rows: they are cut into segments, which a team merges.
TEST(CudaOperatorSizesTest, ABiasGradientOfManyRowsIsSummedInSegments) {
  DoubleDevice device;
  const OpExample example{.name = "rows",
                          .attributes = {{"summed", int64_t{1}}},
                          .inputs = {{DType::kFloat32, {5000, 32}}, {DType::kFloat32, {5000, 40}}}};
  const NodeCase test_case = make_case(get_op("MatMulWeightBiasGrad"), example, DType::kFloat64);
  const std::vector<Tensor> expected = run_case(test_case);
  const std::vector<Tensor> actual = run_on_device(test_case, *device);
  EXPECT_TRUE(tensors_near(actual.at(0), expected.at(0), 1e-10));
  EXPECT_TRUE(tensors_near(actual.at(1), expected.at(1), 1e-10));
  EXPECT_EQ(cuda_double::num_launches(), 2);
}

// A thread block updates some thousand elements, each lane several of them.
TEST(CudaOperatorSizesTest, UpdatesOfManyBlocksEqualTheReferenceKernel) {
  DoubleDevice device;
  for (const char* name : {"Sgd",
                           "Momentum",
                           "Adagrad",
                           "Adam",
                           "AdamW",
                           "LambDirection",
                           "LambApply",
                           "OnnxAdagrad",
                           "OnnxAdam",
                           "OnnxMomentum"}) {
    SCOPED_TRACE(name);
    OpExample example = get_op(name).examples.at(0);
    for (size_t i = 0; i < example.inputs.size(); ++i) {
      if (!example.inputs[i].shape.empty()) {
        example.inputs[i].shape = {5000};
      }
    }
    const NodeCase test_case = make_case(get_op(name), example, DType::kFloat64);
    const std::vector<Tensor> expected = run_case(test_case);
    const std::vector<Tensor> actual = run_on_device(test_case, *device);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(tensors_near(actual[i], expected[i], 1e-12)) << "output " << i;
    }
  }
}

// Four elements share a block of random numbers where the last dim allows: the draws are the CPU's.
TEST(CudaDropoutTest, DrawsWhatTheCpuDraws) {
  DoubleDevice device;
  for (const Shape& shape : {Shape{5, 8}, Shape{3, 4, 12}, Shape{3, 6}, Shape{9}, Shape{1, 4}}) {
    const OpExample example{.name = "draws",
                            .attributes = get_op("Dropout").examples.at(0).attributes,
                            .inputs = {{DType::kFloat32, shape}}};
    const NodeCase test_case = make_case(get_op("Dropout"), example);
    const std::vector<Tensor> expected = run_case(test_case);
    const std::vector<Tensor> actual = run_on_device(test_case, *device);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(tensors_identical(actual[i], expected[i])) << shape_string(shape);
    }
  }
}

// Every element finds the places that were padded with it, however often a mode repeats it.
TEST(CudaPadTest, GradientsOfPaddingEqualTheReferenceKernels) {
  DoubleDevice device;
  for (const char* mode : {"constant", "reflect", "edge", "wrap"}) {
    for (int64_t n = 1; n <= 4; ++n) {
      for (int64_t begin = -1; begin <= 7; ++begin) {
        for (const int64_t end : {-1, 0, 5}) {
          if (n + std::min<int64_t>(begin, 0) + std::min<int64_t>(end, 0) < 1) {
            continue;  // refused: nothing is left to repeat
          }
          const OpExample example{.name = "places",
                                  .attributes = {{"pads", std::vector<int64_t>{0, begin, 0, end}},
                                                 {"mode", std::string(mode)}},
                                  .inputs = {{DType::kFloat32, {2, begin + n + end}}}};
          const NodeCase test_case = make_case(get_op("PadGrad"), example, DType::kFloat64);
          EXPECT_TRUE(tensors_near(
              run_on_device(test_case, *device).at(0), run_case(test_case).at(0), 1e-12))
              << mode << ", " << n << " elements between " << begin << " and " << end;
        }
      }
    }
  }
}

// Copies by words of several elements, and of one where a dim or an offset is no multiple.
TEST(CudaCopyTest, WordsOfSeveralElementsEqualTheReferenceKernel) {
  DoubleDevice device;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const int64_t inner : {1, 2, 3, 4, 6, 8, 16}) {
      const auto expect_equal = [&](const std::string& name, const OpExample& example) {
        const NodeCase test_case = make_case(get_op(name), example);
        const std::vector<Tensor> expected = run_case(test_case);
        const std::vector<Tensor> actual = run_on_device(test_case, *device);
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(tensors_identical(actual[i], expected[i]))
              << name << " of " << dtype_name(dtype) << ", innermost dim " << inner;
        }
      };
      const std::vector<int64_t> sizes = {inner, 3, inner};
      expect_equal("Split",
                   {.name = "words",
                    .attributes = {{"axis", int64_t{1}}, {"split", sizes}},
                    .inputs = {{dtype, {3, 2 * inner + 3}}}});
      expect_equal("Transpose",
                   {.name = "words",
                    .attributes = {{"perm", std::vector<int64_t>{1, 0, 2}}},
                    .inputs = {{dtype, {3, 5, inner}}}});
      expect_equal("Expand",
                   {.name = "words",
                    .attributes = {{"shape", Shape{3, 5, inner}}},
                    .inputs = {{dtype, {3, 1, inner}}}});
    }
  }
}

// What no integer is near to becomes the nearest one, and NaN 0, as on the CPU.
TEST(CudaCastTest, IntegersOfFloatsBeyondTheirRangeEqualTheCpus) {
  DoubleDevice device;
  const float infinity = std::numeric_limits<float>::infinity();
  const Tensor numbers = Tensor::from(
      std::vector<float>{NAN, infinity, -infinity, 1e10f, -1e10f, 300.0f, -5.0f, 2.9f}, {8});
  for (const DType from : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const DType to : {DType::kInt8,
                           DType::kInt16,
                           DType::kInt32,
                           DType::kInt64,
                           DType::kUInt8,
                           DType::kUInt16,
                           DType::kUInt32,
                           DType::kUInt64,
                           DType::kBool}) {
      const OpExample example{.name = "beyond",
                              .attributes = {{"to", std::string(dtype_name(to))}},
                              .inputs = {{from, {8}}},
                              .values = {numbers.cast(from)}};
      const NodeCase test_case = make_case(get_op("Cast"), example);
      EXPECT_TRUE(
          tensors_near(run_on_device(test_case, *device).at(0), run_case(test_case).at(0), 0))
          << dtype_name(from) << " to " << dtype_name(to);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Registry,
                         CudaOperatorTest,
                         ::testing::ValuesIn(op_names()),
                         [](const auto& row) { return test_name(row.param); });

}  // namespace
}  // namespace trainrt::testing
