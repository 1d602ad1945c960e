// What convolutions and pools share: windows that slide over spatial dims.
#pragma once

#include <string>
#include <vector>

#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

// A kernel, stride, dilation or pad: larger than any image, and sums and products of two are within
// int64.
constexpr int64_t kMostPlaces = int64_t{1} << 30;

// Attributes of a window operator in our form: everything explicit, one entry per spatial dim.
// `layout` is "nchw" ([n, c, spatial...]) or "nhwc" ([n, spatial..., c]), for any number of dims.
struct Window {
  Shape kernel, strides, dilations, pads_begin, pads_end;
  bool channels_last = false;

  int ndim() const { return static_cast<int>(kernel.size()); }
  // Extent of the dilated kernel over spatial dim d.
  int64_t extent(int d) const { return (kernel[d] - 1) * dilations[d] + 1; }
};

Window window_of(const Attributes& attributes);

// Sizes of [n, c, spatial...] whatever the layout.
struct ImageShape {
  int64_t n = 0, c = 0;
  Shape spatial;
};
ImageShape image_shape(const Shape& shape, bool channels_last);
Shape to_shape(const ImageShape& image, bool channels_last);

// Output sizes of a window that slides over `spatial`. With ceil_mode a last window that would
// start in the end padding is dropped, as ONNX (from opset 19 on explicitly) and PyTorch do.
Shape window_output(const Window& window, const Shape& spatial, bool ceil_mode);

// Reads kernel_shape, strides, dilations, pads and auto_pad of an ONNX node with all defaults, and
// writes them explicitly. `kernel` is used where the attribute is missing (a weight's shape).
Attributes explicit_window(UpgradeContext& u, const Shape& spatial, const Shape& kernel);

// "p0 p1" for prefix p and ndim 2: dims of a sharding equation.
std::string dim_names(const std::string& prefix, int ndim);

}  // namespace trainrt
