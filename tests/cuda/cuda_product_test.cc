// What cuBLASLt is asked for, where the answer could be another product.
#include <gtest/gtest.h>

#include "graph/kernel_pair.h"
#include "graph/op_def.h"
#include "tests/cuda/cuda_double_device.h"
#include "tests/support/device_case.h"

namespace trainrt::testing {
namespace {

class CudaProductTest : public ::testing::Test {
 protected:
  DoubleDevice device_;
};

// 60000 + 60000 is no float16, nor is any part of the sum beyond 65504.
TEST_F(CudaProductTest, SumsOfParts16BitsWideAreAskedForByNoProduct) {
  OpExample example;
  example.name = "large";
  example.inputs = {{DType::kFloat32, {1, 4}}, {DType::kFloat32, {4, 1}}};
  NodeCase product = make_case(get_op("MatMul"), example, DType::kFloat16);
  for (const size_t i : {0, 1, 2, 3}) {
    product.inputs[0].data<Float16>()[i] = Float16(i < 2 ? 300.0f : -300.0f);
    product.inputs[1].data<Float16>()[i] = Float16(200.0f);
  }
  const std::vector<Tensor> y = run_on_device(product, *device_);
  EXPECT_EQ(static_cast<float>(y[0].data<Float16>()[0]), 0);
}

// The memory plan may put what Gelu is taken of where the term was, which cuBLASLt would read.
TEST_F(CudaProductTest, OnlyProductsWithoutATermKeepWhatGeluIsTakenOf) {
  const DeviceSpec& spec = device_->context().spec();
  for (const bool has_term : {false, true}) {
    for (const bool keeps : {false, true}) {
      const TensorType type{DType::kFloat32, {8, 8}};
      OpExample example;
      example.name = "square";
      example.inputs = {type, type, {DType::kFloat32, {8}}, has_term ? type : TensorType{}};
      if (!has_term) {
        example.absent = {3};
      }
      const NodeCase first = make_case(get_op("MatMulAdd"), example);
      OpExample activation;
      activation.name = "tanh";
      activation.attributes = {{"approximate", std::string("tanh")}};
      activation.inputs = {type};
      const NodeCase second = make_case(get_op("Gelu"), activation);
      const OpContext a = first.context(), b = second.context();
      EXPECT_EQ(static_cast<bool>(make_kernel_pair({a, b, 0, keeps}, spec)), !(has_term && keeps));
    }
  }
}

}  // namespace
}  // namespace trainrt::testing
