#include "ops/spatial.h"

#include <algorithm>

namespace trainrt {

namespace {

bool all_within(const Shape& values, int64_t least) {
  return std::all_of(values.begin(), values.end(), [least](int64_t value) {
    return value >= least && value <= kMostPlaces;
  });
}

void require_sizes(const Shape& kernel,
                   const Shape& strides,
                   const Shape& dilations,
                   const Shape& pads) {
  TRAINRT_REQUIRE(all_within(kernel, 1) && all_within(strides, 1) && all_within(dilations, 1) &&
                      all_within(pads, 0),
                  kInvalidModel,
                  "kernel_shape, strides and dilations must be positive and pads not negative, and "
                  "none beyond 2^30, got ",
                  shape_string(kernel),
                  ", ",
                  shape_string(strides),
                  ", ",
                  shape_string(dilations),
                  ", ",
                  shape_string(pads));
}

}  // namespace

Window window_of(const Attributes& attributes) {
  Window window;
  window.kernel = attributes.get_ints("kernel_shape");
  const size_t ndim = window.kernel.size();
  window.strides = attributes.get_ints("strides", Shape(ndim, 1));
  window.dilations = attributes.get_ints("dilations", Shape(ndim, 1));
  const Shape pads = attributes.get_ints("pads", Shape(2 * ndim, 0));
  TRAINRT_REQUIRE(
      window.strides.size() == ndim && window.dilations.size() == ndim && pads.size() == 2 * ndim,
      kInvalidModel,
      "kernel_shape ",
      shape_string(window.kernel),
      ", strides ",
      shape_string(window.strides),
      ", dilations ",
      shape_string(window.dilations),
      " and pads ",
      shape_string(pads),
      " disagree in the number of spatial dims");
  window.pads_begin.assign(pads.begin(), pads.begin() + static_cast<std::ptrdiff_t>(ndim));
  window.pads_end.assign(pads.begin() + static_cast<std::ptrdiff_t>(ndim), pads.end());
  const std::string layout = attributes.get_string("layout", "nchw");
  TRAINRT_REQUIRE(layout == "nchw" || layout == "nhwc",
                  kInvalidModel,
                  "layout '",
                  layout,
                  "' is neither nchw nor nhwc");
  window.channels_last = layout == "nhwc";
  require_sizes(window.kernel, window.strides, window.dilations, pads);
  return window;
}

ImageShape image_shape(const Shape& shape, bool channels_last) {
  TRAINRT_REQUIRE(
      shape.size() >= 2, kInvalidModel, "wanted [n, c, spatial...], got ", shape_string(shape));
  ImageShape image;
  image.n = shape[0];
  image.c = channels_last ? shape.back() : shape[1];
  image.spatial.assign(shape.begin() + (channels_last ? 1 : 2),
                       shape.end() - (channels_last ? 1 : 0));
  return image;
}

Shape to_shape(const ImageShape& image, bool channels_last) {
  Shape shape = {image.n};
  if (!channels_last) {
    shape.push_back(image.c);
  }
  shape.insert(shape.end(), image.spatial.begin(), image.spatial.end());
  if (channels_last) {
    shape.push_back(image.c);
  }
  return shape;
}

Shape window_output(const Window& window, const Shape& spatial, bool ceil_mode) {
  TRAINRT_REQUIRE(static_cast<int>(spatial.size()) == window.ndim(),
                  kInvalidModel,
                  "a window of ",
                  window.ndim(),
                  " dims slides over ",
                  spatial.size(),
                  " spatial dims");
  Shape out(spatial.size());
  for (int d = 0; d < window.ndim(); ++d) {
    const int64_t room = spatial[d] + window.pads_begin[d] + window.pads_end[d] - window.extent(d);
    TRAINRT_REQUIRE(room >= 0,
                    kInvalidModel,
                    "a window of extent ",
                    window.extent(d),
                    " does not fit into spatial dim ",
                    d,
                    " of size ",
                    spatial[d],
                    " with pads ",
                    window.pads_begin[d],
                    " and ",
                    window.pads_end[d]);
    out[d] = (room + (ceil_mode ? window.strides[d] - 1 : 0)) / window.strides[d] + 1;
    if (ceil_mode && (out[d] - 1) * window.strides[d] >= spatial[d] + window.pads_begin[d]) {
      --out[d];
    }
  }
  return out;
}

Attributes explicit_window(UpgradeContext& u, const Shape& spatial, const Shape& kernel) {
  const Attributes& given = u.attributes();
  Attributes attributes;
  const size_t ndim = spatial.size();
  const Shape kernel_shape = given.get_ints("kernel_shape", kernel);
  const Shape strides = given.get_ints("strides", Shape(ndim, 1));
  const Shape dilations = given.get_ints("dilations", Shape(ndim, 1));
  Shape pads = given.get_ints("pads", Shape(2 * ndim, 0));
  if (kernel_shape.size() != ndim || strides.size() != ndim || dilations.size() != ndim ||
      pads.size() != 2 * ndim) {
    u.fail(concat("kernel_shape ",
                  shape_string(kernel_shape),
                  ", strides ",
                  shape_string(strides),
                  ", dilations ",
                  shape_string(dilations),
                  " and pads ",
                  shape_string(pads),
                  " do not fit ",
                  ndim,
                  " spatial dims"));
  }
  const std::string auto_pad = given.get_string("auto_pad", "NOTSET");
  require_sizes(kernel_shape, strides, dilations, auto_pad == "NOTSET" ? pads : Shape());
  if (auto_pad == "VALID") {
    pads.assign(2 * ndim, 0);
  } else if (auto_pad == "SAME_UPPER" || auto_pad == "SAME_LOWER") {
    for (size_t d = 0; d < ndim; ++d) {
      const int64_t out = (spatial[d] + strides[d] - 1) / strides[d];
      const int64_t extent = (kernel_shape[d] - 1) * dilations[d] + 1;
      const int64_t total = std::max<int64_t>(0, (out - 1) * strides[d] + extent - spatial[d]);
      const int64_t small = total / 2;
      pads[d] = auto_pad == "SAME_UPPER" ? small : total - small;
      pads[d + ndim] = total - pads[d];
    }
  } else if (auto_pad != "NOTSET" && !auto_pad.empty()) {
    u.fail("auto_pad '" + auto_pad + "' is not known");
  }
  attributes.set("kernel_shape", kernel_shape);
  attributes.set("strides", strides);
  attributes.set("dilations", dilations);
  attributes.set("pads", pads);
  return attributes;
}

std::string dim_names(const std::string& prefix, int ndim) {
  std::string names;
  for (int d = 0; d < ndim; ++d) {
    names += (d == 0 ? "" : " ") + prefix + std::to_string(d);
  }
  return names;
}

}  // namespace trainrt
