// What GroupNorm's kernels share: the view of an image, and their workspace.
#pragma once

#include "graph/op_def.h"
#include "ops/reduce_segments.h"
#include "ops/spatial.h"

namespace trainrt::group_norm {

struct GroupView {
  int64_t n = 1, groups = 1, channels = 1, s = 1;  // channels per group, positions per channel
  bool last = false;                               // nhwc
  int64_t c() const { return groups * channels; }
  int64_t length() const { return channels * s; }
};

template <typename Context>
GroupView view_of(const Context& op) {
  const Shape& x = op.input_shape(op.node().op_type == "GroupNormGrad" ? 1 : 0);
  TRAINRT_REQUIRE(
      x.size() >= 2, kInvalidModel, "GroupNorm wants [n, c, ...], got ", shape_string(x));
  const bool last = op.attributes().get_string("layout", "nchw") == "nhwc";
  const ImageShape image = image_shape(x, last);
  const int64_t groups = op.attributes().get_int("num_groups");
  TRAINRT_REQUIRE(groups > 0 && image.c % groups == 0,
                  kInvalidModel,
                  "GroupNorm: ",
                  image.c,
                  " channels do not divide into ",
                  groups,
                  " groups");
  return {image.n, groups, image.c / groups, num_elements(image.spatial), last};
}

// Channels-last, an image's positions are cut into parts, each with two sums per channel; the
// parts' sums make those of the image, [n][2][c], and these the numbers of a channel, three arrays
// [n][c]. All in doubles, or the smaller type in a double's place. A function of shapes alone.
struct Scratch {
  int64_t n, c, parts, part;  // of an image; positions per part
  Scratch(const GroupView& v, int64_t wanted) : n(v.n), c(v.c()) {
    part = std::max<int64_t>(1, (v.s + wanted - 1) / std::max<int64_t>(1, wanted));
    parts = (v.s + part - 1) / part;
  }
  int64_t sums() const { return 2 * n * parts * c; }
  int64_t numbers() const { return sums() + 2 * n * c; }  // where they begin
  int64_t bytes() const { return (numbers() + 3 * n * c) * static_cast<int64_t>(sizeof(double)); }
};

inline Scratch device_scratch(const GroupView& v) {
  return {v, reduce::device_segments(v.n * v.c(), v.s, /*columns=*/true)};
}
// Parts of 2^16 elements: enough to outweigh starting them.
inline Scratch cpu_scratch(const GroupView& v) {
  return {v, (v.s * v.c() + (1 << 16) - 1) >> 16};
}

}  // namespace trainrt::group_norm
