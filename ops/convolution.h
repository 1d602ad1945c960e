// The geometry of a convolution, whichever of its three operators (Conv, ConvInputGrad,
// ConvWeightGrad) asks for it.
#pragma once

#include "ops/spatial.h"

namespace trainrt {

struct Convolution {
  Window window;
  int64_t group = 1;
  int64_t n = 0, c = 0, m = 0;
  Shape input, output;  // spatial

  int64_t taps() const { return num_elements(window.kernel); }
  Shape x_shape() const { return to_shape({n, c, input}, window.channels_last); }
  Shape y_shape() const { return to_shape({n, m, output}, window.channels_last); }
  Shape w_shape() const {
    Shape shape = {m, c / group};
    shape.insert(shape.end(), window.kernel.begin(), window.kernel.end());
    return shape;
  }
};

// Of a node of one of the three operators. Context is OpContext or KernelContext. Throws
// kInvalidModel for a group or ndim that makes no sense.
template <typename Context>
Convolution convolution_of(const Context& op) {
  const std::string& type = op.node().op_type;
  Convolution conv;
  conv.window = window_of(op.attributes());
  conv.group = op.attributes().get_int("group", 1);
  TRAINRT_REQUIRE(conv.group > 0, kInvalidModel, "group must be positive, got ", conv.group);
  const ImageShape first = image_shape(op.input_shape(0), conv.window.channels_last);
  conv.n = first.n;
  if (type == "ConvInputGrad") {
    conv.m = first.c;
    conv.output = first.spatial;
    conv.c = op.input_shape(1).at(1) * conv.group;
    conv.input = op.attributes().get_ints("input_spatial");
    return conv;
  }
  conv.c = first.c;
  conv.input = first.spatial;
  conv.output = window_output(conv.window, conv.input, false);
  conv.m = type == "Conv" ? op.input_shape(1).at(0)
                          : image_shape(op.input_shape(1), conv.window.channels_last).c;
  return conv;
}

// Strides of [n, c, spatial...] in elements.
struct ImageStrides {
  int64_t n = 0, c = 0;
  Shape spatial;
};
ImageStrides strides_of(const Shape& shape, bool channels_last);

void convolution_reference(KernelContext& op);

}  // namespace trainrt
