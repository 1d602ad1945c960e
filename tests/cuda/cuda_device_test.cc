// The device itself, where whole runs on the double would not come: sizes at which CUDA refuses.
#include <gmock/gmock.h>

#include <cstdlib>

#include "graph/fused_elementwise.h"
#include "graph/op_def.h"
#include "tests/cuda/cuda_double_device.h"
#include "tests/support/device_case.h"

namespace trainrt::testing {
namespace {

class CudaDeviceTest : public ::testing::Test {
 protected:
  DoubleDevice device_;
};

// CUDA's copies of rows know no rows that are 2 GiB apart.
TEST_F(CudaDeviceTest, CopiesRowsHoweverFarApart) {
  constexpr int64_t kFar = int64_t{3} << 30;
  const std::unique_ptr<DeviceBuffer> from = device_->allocate(16), to = device_->allocate(16);
  const int64_t words[] = {7, 8};
  int64_t copied[] = {0, 0};
  device_->copy_to_device(from->data(), words, sizeof(words));
  device_->copy_to_device(to->data(), copied, sizeof(copied));
  device_->copy_rows(to->data(), kFar, from->data(), kFar, 8, 1, Lane::kCompute);
  device_->copy_rows(to->data() + 8, 8, from->data(), kFar, 8, 1, Lane::kCompute);
  device_->copy_to_host(copied, to->data(), sizeof(copied));
  EXPECT_EQ(copied[0], 7);
  EXPECT_EQ(copied[1], 7);
}

TEST_F(CudaDeviceTest, OperatorsOnNothingLaunchNothing) {
  const auto run_empty = [this](OpDef op, int num_inputs, Attributes attributes) {
    OpExample example{.name = "empty", .attributes = std::move(attributes), .inputs = {}};
    example.inputs.assign(static_cast<size_t>(num_inputs), {DType::kFloat32, {0}});
    const int64_t before = cuda_double::num_launches();
    run_on_device(make_case(op, example), *device_);
    EXPECT_EQ(cuda_double::num_launches(), before) << op.name;
  };
  FusedExpression sum{2, {{"Add", {}, {0, 1}}, {"Tanh", {}, {2}}}, {1}};
  run_empty(get_op(kFusedElementwise), 2, sum.to_attributes());
  run_empty(get_op("Tanh"), 1, {});
  OpDef sgd = get_op("Sgd");
  OpExample example = sgd.examples.at(0);
  for (TensorType& type : example.inputs) {
    type.shape = type.shape.empty() ? type.shape : Shape{0};
  }
  example.values.clear();
  run_on_device(make_case(sgd, example), *device_);
}

TEST_F(CudaDeviceTest, LanesHaveConnectionsOfTheirOwn) {
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  ASSERT_NE(connections, nullptr);
  EXPECT_STREQ(connections, "32");
}

// As Megatron-LM's scripts leave it.
TEST_F(CudaDeviceTest, ASingleConnectionOfTheEnvironmentIsNotTaken) {
  constexpr const char* kVariable = "CUDA_DEVICE_MAX_CONNECTIONS";
  for (const char* given : {"1", "31", "many", "32", "64"}) {
    const bool enough = std::string(given) == "32" || std::string(given) == "64";
    ::setenv(kVariable, given, 1);
    ::testing::internal::CaptureStderr();
    keep_lanes_apart();
    const std::string told = ::testing::internal::GetCapturedStderr();
    EXPECT_STREQ(std::getenv(kVariable), enough ? given : "32");
    EXPECT_EQ(told.find(concat(kVariable, " is '", given, "'")) == std::string::npos, enough)
        << told;
  }
  ::setenv(kVariable, "32", 1);
}

TEST(CudaVersionTest, ACudnnThatComputesWrongResultsIsRefused) {
  for (const auto& [version, good] : {std::pair<size_t, bool>{91500, false}, {91501, true}}) {
    cuda_double::reset({.cudnn_version = version});
    try {
      cuda_module().make_device(0, {});
      EXPECT_TRUE(good);
    } catch (const Error& error) {
      EXPECT_FALSE(good);
      EXPECT_EQ(error.code(), ErrorCode::kDevice);
      EXPECT_THAT(error.message(),
                  ::testing::AllOf(::testing::HasSubstr("cuDNN 9.15.0 "),
                                   ::testing::HasSubstr("9.15.1 or newer")));
    }
  }
  cuda_double::reset();
}

// What failed before is no reason for a later kernel to.
TEST_F(CudaDeviceTest, AFailureLeavesNoErrorBehind) {
  cuda_double::fail_call(1);
  EXPECT_THROW(device_->fill_zero(nullptr, 8), Error);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace trainrt::testing
