// Normalizations on the double.
#include <gtest/gtest.h>

#include "graph/op_def.h"
#include "tests/cuda/cuda_double_device.h"
#include "tests/support/channels_last.h"
#include "tests/support/device_case.h"
#include "tests/support/norm_case.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

TEST(CudaNormTest, StatisticsOfSixteenBitRowsAreFloat32) {
  DoubleDevice device;
  for (const char* op : {"LayerNormalization", "RMSNormalization", "GroupNorm"}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      const auto run = [&](const NodeCase& test_case) { return run_on_device(test_case, *device); };
      expect_exact_statistics(op, dtype, run);
      if (std::string(op) == "GroupNorm") {
        expect_exact_statistics(op, dtype, run, /*last=*/true);
      }
    }
  }
}

// `example` of images [4, 6, 3, 5] with other sizes: 105 elements per channel.
OpExample with_channels(OpExample example, int64_t c) {
  example.attributes.set("count", int64_t{105});
  for (size_t i = 0; i < example.inputs.size(); ++i) {
    Shape& shape = example.inputs[i].shape;
    shape = shape.size() == 4 ? Shape{3, c, 5, 7} : shape.size() == 2 ? Shape{2, c} : Shape{c};
    if (shape.size() == 2) {  // sums of x and x^2
      std::vector<double> values(static_cast<size_t>(2 * c), 115.0);
      for (int64_t k = 0; k < c; ++k) {
        values[static_cast<size_t>(k)] = static_cast<double>(k - 3);
      }
      example.values[i] = Tensor::from(values, shape);
    }
  }
  return example;
}

// Images whose channels lie side by side go through kernels of whole packs of them, several rows at
// a time; others element by element. Neither rows nor, with 12 channels of 16 bits, channels need
// be whole packs.
TEST(CudaNormTest, PacksOfChannelsGiveTheBitsOfSingleElements) {
  DoubleDevice device;
  for (const char* name : {"BatchNormApply", "BatchNormInputGrad"}) {
    const OpDef& op = get_op(name);
    for (const OpExample& example : op.examples) {
      if (example.attributes.get_string("layout") != "nchw") {
        continue;
      }
      for (const DType dtype :
           {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
        for (const int64_t c : {12, 16}) {
          SCOPED_TRACE(concat(name, " '", example.name, "', ", dtype_name(dtype), ", ", c));
          const NodeCase planes = make_case(op, with_channels(example, c), dtype);
          EXPECT_TRUE(tensors_identical(run_on_device(channels_last(planes), *device).at(0),
                                        channels_last(run_on_device(planes, *device).at(0))));
        }
      }
    }
  }
}

// The same of a group's channels; sums are made in another order there.
TEST(CudaNormTest, GroupsOfChannelsSideBySideEqualThoseOfPlanes) {
  DoubleDevice device;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    for (const int64_t c : {12, 16}) {
      SCOPED_TRACE(concat(dtype_name(dtype), ", ", c));
      const TensorType image{DType::kFloat32, {3, c, 9, 21}}, parameter{DType::kFloat32, {c}},
          statistic{DType::kFloat32, {3, 4}};
      const OpExample forward{.name = "image",
                              .attributes = {{"num_groups", int64_t{4}}, {"epsilon", 1e-5}},
                              .inputs = {image, parameter, parameter}};
      OpExample backward = forward;
      backward.inputs = {image, image, parameter, statistic, statistic};
      for (const NodeCase& planes : {make_case(get_op("GroupNorm"), forward, dtype),
                                     make_case(get_op("GroupNormGrad"), backward, dtype)}) {
        const std::vector<Tensor> expected = run_on_device(planes, *device);
        const std::vector<Tensor> actual = run_on_device(channels_last(planes), *device);
        for (size_t i = 0; i < expected.size(); ++i) {
          EXPECT_TRUE(tensors_near(actual[i], channels_last(expected[i]), kernel_tolerance(dtype)))
              << "output " << i;
        }
      }
    }
  }
}

// More rows than a block has threads, and so segments than a warp has lanes.
TEST(CudaNormTest, SumsOverManyRowsEqualTheReferenceKernel) {
  DoubleDevice device;
  const auto expect_equal = [&](const std::string& name, const OpExample& example) {
    SCOPED_TRACE(name);
    const NodeCase test_case = make_case(get_op(name), example, DType::kFloat64);
    const std::vector<Tensor> expected = run_case(test_case);
    const std::vector<Tensor> actual = run_on_device(test_case, *device);
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(tensors_near(actual[i], expected[i], 1e-10)) << "output " << i;
    }
  };
  const Attributes last = {{"count", int64_t{40000}}, {"layout", std::string("nhwc")}};
  const TensorType image{DType::kFloat32, {2, 100, 200, 2}};
  expect_equal("BatchNormMoments", {.name = "many", .attributes = last, .inputs = {image}});
  expect_equal("BatchNormGradSums",
               {.name = "many",
                .attributes = last,
                .inputs = {image, image, {DType::kFloat64, {2, 2}}},
                .values = {{}, {}, Tensor::from<double>({-90, 200, 40000, 50000}, {2, 2})}});
  const TensorType wide{DType::kFloat32, {2, 100, 200, 4}}, parameter{DType::kFloat32, {4}},
      groups{DType::kFloat32, {2, 2}};
  const Attributes grouped = {{"num_groups", int64_t{2}}, {"layout", std::string("nhwc")}};
  expect_equal("GroupNorm",
               {.name = "many", .attributes = grouped, .inputs = {wide, parameter, parameter}});
  expect_equal(
      "GroupNormGrad",
      {.name = "many", .attributes = grouped, .inputs = {wide, wide, parameter, groups, groups}});
  const TensorType rows{DType::kFloat32, {5000, 3}}, statistic{DType::kFloat32, {5000, 1}};
  expect_equal("LayerNormGrad",
               {.name = "many",
                .attributes = {{"axis", int64_t{1}}},
                .inputs = {rows, rows, {DType::kFloat32, {3}}, statistic, statistic}});
}

}  // namespace
}  // namespace trainrt::testing
