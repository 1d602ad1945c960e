// Pools on the double: packs of channels against single ones.
#include <gtest/gtest.h>

#include "graph/op_def.h"
#include "tests/cuda/cuda_double_device.h"
#include "tests/support/channels_last.h"
#include "tests/support/device_case.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

class CudaPoolTest : public ::testing::Test {
 protected:
  // Outputs in ONNX order, after those of the other layout were found to have the same bits.
  std::vector<Tensor> run(const NodeCase& planes) {
    const std::vector<Tensor> outputs = run_on_device(planes, *device_);
    const NodeCase packs = channels_last(planes);
    const std::vector<Tensor> turned = run_on_device(packs, *device_);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i].dtype() == DType::kInt64) {  // positions in an image of that layout
        EXPECT_TRUE(tensors_identical(turned[i], run_case(packs)[i])) << "output " << i;
      } else {
        EXPECT_TRUE(tensors_identical(turned[i], channels_last(outputs[i]))) << "output " << i;
      }
    }
    return outputs;
  }

  DoubleDevice device_;
};

// A kernel of 3 x 100 has more taps than a byte counts.
TEST_F(CudaPoolTest, PacksOfChannelsGiveTheBitsOfSingleElements) {
  struct Case {
    const char* name;
    Shape kernel, strides, dilations, pads;
    int64_t ceil_mode, count_include_pad;
  };
  for (const Case& c : {Case{"overlapping", {3, 3}, {2, 2}, {1, 1}, {1, 1, 1, 1}, 0, 0},
                        Case{"apart", {2, 1}, {3, 2}, {1, 1}, {0, 0, 0, 0}, 0, 0},
                        Case{"ceil", {3, 3}, {2, 2}, {1, 1}, {0, 1, 0, 1}, 1, 1},
                        Case{"dilated", {2, 3}, {1, 2}, {3, 2}, {1, 0, 0, 1}, 0, 1},
                        Case{"wide", {3, 100}, {1, 1}, {1, 1}, {1, 50, 1, 50}, 0, 0}}) {
    for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
      SCOPED_TRACE(concat(c.name, ", ", dtype_name(dtype)));
      const Shape x = {2, 16, 9, 11};
      const Attributes attributes = {{"kernel_shape", c.kernel},
                                     {"strides", c.strides},
                                     {"dilations", c.dilations},
                                     {"pads", c.pads},
                                     {"ceil_mode", c.ceil_mode},
                                     {"count_include_pad", c.count_include_pad},
                                     {"layout", std::string("nchw")}};
      OpExample example{.name = c.name, .attributes = attributes, .inputs = {{DType::kFloat32, x}}};
      const std::vector<Tensor> y = run(make_case(get_op("MaxPool"), example, dtype));
      run(make_case(get_op("AveragePool"), example, dtype));
      example.attributes.set("input_spatial", Shape{x[2], x[3]});
      const TensorType dy{DType::kFloat32, y[0].shape()};
      example.inputs = {dy};
      run(make_case(get_op("AveragePoolGrad"), example, dtype));
      example.inputs = {{y[2].dtype(), y[2].shape()}, dy};
      example.values = {y[2], {}};
      run(make_case(get_op("MaxPoolGrad"), example, dtype));
    }
  }
}

}  // namespace
}  // namespace trainrt::testing
