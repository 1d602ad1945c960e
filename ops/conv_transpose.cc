// ONNX ConvTranspose: the gradient of a convolution with respect to its input, applied to x as the
// output gradient. The convolution is the one whose input has the wanted output's spatial sizes;
// w [c, m / group, kernel...] is already that convolution's weight.
#include <algorithm>

#include "graph/upgrade.h"
#include "ops/spatial.h"

namespace trainrt {

namespace {

// Output sizes and pads by the formulas of ConvTranspose-11: with output_shape or auto_pad the pads
// follow from the output's size, else the output's size follows from the pads.
void resolve_output(UpgradeContext& u, const Shape& in, Attributes& attributes, Shape& out) {
  const Window window = window_of(attributes);
  const size_t ndim = in.size();
  const Shape extra = u.attributes().get_ints("output_padding", Shape(ndim, 0));
  Shape wanted = u.attributes().get_ints("output_shape", Shape{});
  const std::string auto_pad = u.attributes().get_string("auto_pad", "NOTSET");
  if (extra.size() != ndim || (!wanted.empty() && wanted.size() < ndim)) {
    u.fail(concat("output_padding ",
                  shape_string(extra),
                  " and output_shape ",
                  shape_string(wanted),
                  " do not fit ",
                  ndim,
                  " spatial dims"));
  }
  if (wanted.size() > ndim) {  // some exporters give the whole shape
    wanted.erase(wanted.begin(), wanted.end() - static_cast<std::ptrdiff_t>(ndim));
  }
  const bool same = auto_pad == "SAME_UPPER" || auto_pad == "SAME_LOWER";
  Shape pads(2 * ndim);
  out.resize(ndim);
  for (size_t d = 0; d < ndim; ++d) {
    const int dim = static_cast<int>(d);
    if (extra[d] < 0 || extra[d] >= std::max(window.strides[d], window.dilations[d])) {
      u.fail(concat("output_padding ", extra[d], " is not below stride or dilation"));
    }
    const auto sized = [](int64_t size) { return size >= 0 && size <= kMostPlaces; };
    if (!sized(in[d]) || (!wanted.empty() && !sized(wanted[d]))) {
      u.fail(concat("x of spatial sizes ",
                    shape_string(in),
                    " and output_shape ",
                    shape_string(wanted),
                    " must not go beyond 2^30"));
    }
    const int64_t full = window.strides[d] * (in[d] - 1) + extra[d] + window.extent(dim);
    if (wanted.empty() && !same) {
      pads[d] = window.pads_begin[d];
      pads[d + ndim] = window.pads_end[d];
      out[d] = full - pads[d] - pads[d + ndim];
      continue;
    }
    out[d] = wanted.empty() ? in[d] * window.strides[d] : wanted[d];
    const int64_t total = std::max<int64_t>(0, full - out[d]);
    const int64_t half = total / 2;
    pads[d] = auto_pad == "SAME_UPPER" ? half : total - half;
    pads[d + ndim] = total - pads[d];
  }
  attributes.set("pads", pads);
}

void upgrade(UpgradeContext& u) {
  const Shape x = u.shape(u.input(0));
  const Shape w = u.shape(u.input(1));
  if (x.size() < 3 || w.size() != x.size()) {
    u.fail(concat("wanted x [n, c, spatial...] and w [c, m / group, kernel...], got ",
                  shape_string(x),
                  " and ",
                  shape_string(w)));
  }
  const Shape in(x.begin() + 2, x.end());
  const std::string auto_pad = u.attributes().get_string("auto_pad", "NOTSET");
  u.attributes().set("auto_pad", std::string("NOTSET"));
  Attributes attributes = explicit_window(u, in, {w.begin() + 2, w.end()});
  u.attributes().set("auto_pad", auto_pad);
  Shape out;
  resolve_output(u, in, attributes, out);
  attributes.set("group", u.attributes().get_int("group", 1));
  // What lies beyond the reach of every window is padded on afterwards: an output_padding of at
  // least the stride, or an output_shape larger than the windows cover.
  const Window window = window_of(attributes);
  Shape reached = out;
  std::vector<int64_t> beyond(2 * x.size(), 0);
  bool any_beyond = false;
  for (size_t d = 0; d < out.size(); ++d) {
    const int64_t last = window.strides[d] * (in[d] - 1) + window.extent(static_cast<int>(d)) -
                         window.pads_begin[d] - window.pads_end[d] + window.strides[d] - 1;
    reached[d] = std::min(out[d], last);
    beyond[x.size() + 2 + d] = out[d] - reached[d];
    any_beyond = any_beyond || out[d] != reached[d];
  }
  attributes.set("input_spatial", reached);
  ValueId y = u.emit("ConvInputGrad", {u.input(0), u.input(1)}, attributes).at(0);
  if (any_beyond) {
    y = u.op("Pad", {y}, {{"pads", beyond}, {"mode", std::string("constant")}, {"value", 0.0}});
  }
  if (u.has_input(2)) {
    const int64_t channels = u.shape(y)[1];
    TRAINRT_REQUIRE(u.shape(u.input(2)) == Shape{channels},
                    kInvalidModel,
                    "the bias is ",
                    shape_string(u.shape(u.input(2))),
                    ", wanted [",
                    channels,
                    "]");
    Shape bias_shape(x.size() - 1, 1);
    bias_shape[0] = channels;
    y = u.add(y, u.reshape(u.input(2), bias_shape));
  }
  u.set_output(0, y);
}

const RegisterUpgrade kConvTranspose{"ConvTranspose", upgrade};

}  // namespace

}  // namespace trainrt
