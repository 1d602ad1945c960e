// The sparse matrices that Resize applies axis by axis (ops/resize.cc), for the kernels of both
// devices.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "graph/op_def.h"

namespace trainrt {

// y[i] = sum over taps t of weight[i][t] x[index[i][t]] + constant[i].
struct AxisMap {
  int axis = 0;
  int64_t in = 1, out = 1, taps = 1;
  std::vector<int64_t> index;
  std::vector<double> weight;
  std::vector<double> constant;  // extrapolation; empty: none
};

inline double cubic_weight(double distance, double a) {
  const double t = std::fabs(distance);
  if (t <= 1) {
    return ((a + 2) * t - (a + 3)) * t * t + 1;
  }
  return t < 2 ? ((a * t - 5 * a) * t + 8 * a) * t - 4 * a : 0;
}

inline double linear_weight(double distance) {
  return std::max(0.0, 1 - std::fabs(distance));
}

// Everything that a map of one axis depends on.
struct AxisSpec {
  std::string mode, coordinates, rounding;
  double scale = 1, cubic_a = -0.75, roi_start = 0, roi_end = 1, extrapolation = 0;
  bool exclude_outside = false, antialias = false;
};

// The position in x of output element i.
inline double source_position(const AxisSpec& s, int64_t i, int64_t in, int64_t out) {
  const double x = static_cast<double>(i);
  const double n = static_cast<double>(in);
  const double m = static_cast<double>(out);
  if (s.coordinates == "asymmetric") {
    return x / s.scale;
  }
  if (s.coordinates == "align_corners") {
    // The fractional size, as ONNX computes it: it differs from `out` where scales were given.
    return out == 1 ? 0 : x * (n - 1) / (s.scale * n - 1);
  }
  if (s.coordinates == "pytorch_half_pixel") {
    return out == 1 ? 0 : (x + 0.5) / s.scale - 0.5;
  }
  if (s.coordinates == "half_pixel_symmetric") {
    // The output's centre is held where an output of the exact fractional size would have it.
    const double adjustment = m / (s.scale * n);
    const double offset = n / 2 * (1 - adjustment);
    return offset + (x + 0.5) / s.scale - 0.5;
  }
  if (s.coordinates == "tf_half_pixel_for_nn") {
    return (x + 0.5) / s.scale;
  }
  if (s.coordinates == "tf_crop_and_resize") {
    return out == 1 ? 0.5 * (s.roi_start + s.roi_end) * (n - 1)
                    : s.roi_start * (n - 1) + x * (s.roi_end - s.roi_start) * (n - 1) / (m - 1);
  }
  return (x + 0.5) / s.scale - 0.5;  // half_pixel
}

inline int64_t round_position(const AxisSpec& s, double x) {
  const std::string& rounding = s.rounding;
  if (rounding == "floor" || (rounding == "simple" && s.scale >= 1)) {
    return static_cast<int64_t>(std::floor(x));
  }
  if (rounding == "ceil" || rounding == "simple") {
    return static_cast<int64_t>(std::ceil(x));
  }
  return static_cast<int64_t>(rounding == "round_prefer_ceil" ? std::floor(x + 0.5)
                                                              : std::ceil(x - 0.5));
}

inline AxisMap nearest_map(const AxisSpec& s, int axis, int64_t in, int64_t out) {
  AxisMap map{axis, in, out, 1, {}, {}, {}};
  for (int64_t i = 0; i < out; ++i) {
    const int64_t position = round_position(s, source_position(s, i, in, out));
    map.index.push_back(std::clamp<int64_t>(position, 0, in - 1));
    map.weight.push_back(1);
  }
  return map;
}

// Linear and cubic: taps around the position; antialias stretches the filter when shrinking.
inline AxisMap filter_map(const AxisSpec& s, int axis, int64_t in, int64_t out) {
  const bool cubic = s.mode == "cubic";
  const double stretch = s.antialias && s.scale < 1 ? 1 / s.scale : 1;
  const double radius = (cubic ? 2 : 1) * stretch;
  AxisMap map{axis, in, out, 2 * static_cast<int64_t>(std::ceil(radius)), {}, {}, {}};
  for (int64_t i = 0; i < out; ++i) {
    const double x = source_position(s, i, in, out);
    const int64_t first = static_cast<int64_t>(std::floor(x)) - map.taps / 2 + 1;
    double sum = 0;
    for (int64_t t = 0; t < map.taps; ++t) {
      const double distance = (x - static_cast<double>(first + t)) / stretch;
      const bool outside = first + t < 0 || first + t >= in;
      double weight = cubic ? cubic_weight(distance, s.cubic_a) : linear_weight(distance);
      weight = outside && s.exclude_outside ? 0 : weight;
      sum += weight;
      map.index.push_back(std::clamp<int64_t>(first + t, 0, in - 1));
      map.weight.push_back(weight);
    }
    for (int64_t t = 0; t < map.taps && sum != 0; ++t) {
      map.weight[map.weight.size() - 1 - static_cast<size_t>(t)] /= sum;
    }
  }
  return map;
}

inline AxisMap make_map(const AxisSpec& s, int axis, int64_t in, int64_t out) {
  AxisMap map = s.mode == "nearest" ? nearest_map(s, axis, in, out) : filter_map(s, axis, in, out);
  if (s.coordinates == "tf_crop_and_resize") {
    map.constant.assign(static_cast<size_t>(out), 0.0);
    for (int64_t i = 0; i < out; ++i) {
      const double x = source_position(s, i, in, out);
      if (x < 0 || x > static_cast<double>(in - 1)) {
        map.constant[static_cast<size_t>(i)] = s.extrapolation;
        for (int64_t t = 0; t < map.taps; ++t) {
          map.weight[static_cast<size_t>(i * map.taps + t)] = 0;
        }
      }
    }
  }
  return map;
}

// The maps of all axes that change anything, first axis first.
inline std::vector<AxisMap> resize_maps(const Attributes& attributes,
                                        const Shape& in,
                                        const Shape& out) {
  AxisSpec s;
  s.mode = attributes.get_string("mode", "nearest");
  s.coordinates = attributes.get_string("coordinate_transformation_mode", "half_pixel");
  s.rounding = attributes.get_string("nearest_mode", "round_prefer_floor");
  s.cubic_a = attributes.get_float("cubic_coeff_a", -0.75);
  s.exclude_outside = attributes.get_int("exclude_outside", 0) != 0;
  s.antialias = attributes.get_int("antialias", 0) != 0;
  s.extrapolation = attributes.get_float("extrapolation_value", 0);
  const std::vector<double> scales = attributes.get_floats("scales", {});
  const std::vector<double> roi = attributes.get_floats("roi", {});
  std::vector<AxisMap> maps;
  for (size_t d = 0; d < in.size(); ++d) {
    s.scale =
        d < scales.size() ? scales[d] : static_cast<double>(out[d]) / static_cast<double>(in[d]);
    s.roi_start = roi.size() == 2 * in.size() ? roi[d] : 0;
    s.roi_end = roi.size() == 2 * in.size() ? roi[d + in.size()] : 1;
    const bool crops =
        s.coordinates == "tf_crop_and_resize" && (s.roi_start != 0 || s.roi_end != 1);
    if (in[d] != out[d] || s.scale != 1 || crops) {
      maps.push_back(make_map(s, static_cast<int>(d), in[d], out[d]));
    }
  }
  return maps;
}

struct ResizeProblem {
  Shape in, out;  // of the forward operator
  bool transposed = false;
};

template <typename Context>
ResizeProblem resize_problem(const Context& op) {
  if (op.node().op_type == "ResizeGrad") {
    return {op.attributes().get_ints("input_shape"), op.input_shape(0), true};
  }
  return {op.input_shape(0), op.attributes().get_ints("sizes"), false};
}

}  // namespace trainrt
