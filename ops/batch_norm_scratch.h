// Workspace of BatchNorm's CUDA kernels over images: values of a channel that every element of it
// needs, then sums of parts of the rows. A function of the shape, so that a plan knows it.
#pragma once

#include "ops/reduce_segments.h"
#include "ops/spatial.h"

namespace trainrt::batch_norm {

struct DeviceScratch {
  static constexpr int64_t kCoefficients = 6;  // arrays of one double per channel at most
  int64_t n = 0, c = 0, s = 0;
  bool columns = false;  // channels are contiguous
  int64_t segments = 1;  // of the rows, where a thread walks down a channel

  DeviceScratch(const Shape& shape, const Attributes& attributes) {
    const bool last = attributes.get_string("layout", "nchw") == "nhwc";
    const ImageShape image = image_shape(shape, last);
    n = image.n;
    c = image.c;
    s = num_elements(image.spatial);
    columns = last || s == 1;
    segments = columns ? reduce::device_segments(c, n * s, true) : 1;
  }
  int64_t bytes() const {
    return (kCoefficients + (columns ? 2 * segments : 0)) * c *
           static_cast<int64_t>(sizeof(double));
  }
};

}  // namespace trainrt::batch_norm
