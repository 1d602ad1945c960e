// DFT and STFT as matrix products. Real and imaginary parts are the last dim, so a transform of N
// points to M is one product of [..., N * parts] by a constant [N * parts, M * 2]:
//
//   X_k = sum_n x_n exp(-+ 2 pi i k n / N)      (inverse: the other sign, over N)
//
// O(N^2) per line, where an FFT has O(N log N); but it has a gradient, a cost and a sharding rule
// for free, and frames of audio are some hundred points long.
#include <cmath>

#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/int_scalar.h"

namespace trainrt {

namespace {

constexpr int64_t kMostElements = int64_t{1} << 24;  // of the constant matrix
constexpr double kTwoPi = 6.283185307179586477;

struct Transform {
  int64_t points = 0;
  int64_t bins = 0;
  bool inverse = false;
};

Transform transform_of(int64_t points, bool onesided, bool inverse) {
  return {points, onesided ? points / 2 + 1 : points, inverse};
}

ValueId matrix(UpgradeContext& u, const Transform& t, int64_t parts, DType dtype) {
  if (t.points < 1 || t.points * parts > kMostElements / (2 * t.bins)) {
    u.fail(concat("a transform of ", t.points, " points is too long here"));
  }
  const double sign = t.inverse ? 1 : -1,
               scale = t.inverse ? 1.0 / static_cast<double>(t.points) : 1;
  std::vector<double> w(static_cast<size_t>(t.points * parts * t.bins * 2));
  for (int64_t n = 0; n < t.points; ++n) {
    for (int64_t k = 0; k < t.bins; ++k) {
      // k n modulo N keeps the angle small, and so exact.
      const double angle =
          sign * kTwoPi * static_cast<double>(k * n % t.points) / static_cast<double>(t.points);
      const double re = scale * std::cos(angle), im = scale * std::sin(angle);
      double* row = w.data() + (n * parts * t.bins + k) * 2;
      row[0] = re;
      row[1] = im;
      if (parts == 2) {  // i (re + i im)
        row[2 * t.bins] = -im;
        row[2 * t.bins + 1] = re;
      }
    }
  }
  return u.constant(Tensor::from(w, {t.points * parts, t.bins * 2}).cast(dtype));
}

// x [..., points, parts] -> [..., bins, 2].
ValueId transform_last(UpgradeContext& u, ValueId x, const Transform& t) {
  Shape shape = u.shape(x);
  const int64_t parts = shape.back();
  Shape lines(shape.begin(), shape.end() - 2);
  lines.push_back(t.points * parts);
  const ValueId y = u.matmul(u.reshape(x, lines), matrix(u, t, parts, u.dtype(x)));
  shape[shape.size() - 2] = t.bins;
  shape.back() = 2;
  return u.reshape(y, shape);
}

// x cut or padded with zeros to `points` along its second last dim.
ValueId fit_length(UpgradeContext& u, ValueId x, int64_t points) {
  const Shape shape = u.shape(x);
  const int64_t axis = static_cast<int64_t>(shape.size()) - 2;
  const int64_t now = shape[static_cast<size_t>(axis)];
  if (now > points) {
    return u.op("Slice",
                {x},
                {{"axes", std::vector<int64_t>{axis}},
                 {"starts", std::vector<int64_t>{0}},
                 {"ends", std::vector<int64_t>{points}},
                 {"steps", std::vector<int64_t>{1}}});
  }
  if (now < points) {
    std::vector<int64_t> pads(2 * shape.size(), 0);
    pads[shape.size() + static_cast<size_t>(axis)] = points - now;
    return u.op("Pad", {x}, {{"pads", pads}, {"mode", std::string("constant")}, {"value", 0.0}});
  }
  return x;
}

void require_parts(UpgradeContext& u, const Shape& shape) {
  if (shape.size() < 3 || (shape.back() != 1 && shape.back() != 2)) {
    u.fail(concat("wanted [batch, ..., 1 or 2], got ", shape_string(shape)));
  }
}

void upgrade_dft(UpgradeContext& u) {
  const ValueId x = u.input(0);
  const Shape shape = u.shape(x);
  require_parts(u, shape);
  const int ndim = static_cast<int>(shape.size());
  const int64_t given = u.opset() < 20   ? u.attributes().get_int("axis", 1)
                        : u.has_input(2) ? int_scalar(u, 2)
                                         : -2;
  const int axis = normalize_axis(given, ndim);
  if (axis == ndim - 1) {
    u.fail("the last dim holds the parts of complex numbers and cannot be transformed");
  }
  const bool onesided = u.attributes().get_int("onesided", 0) != 0;
  const bool inverse = u.attributes().get_int("inverse", 0) != 0;
  if (onesided && (inverse || shape.back() != 1)) {
    u.fail("a one-sided transform is supported for real input and forward alone");
  }
  // The axis moves to the second last place and back; the swap is its own inverse.
  std::vector<int64_t> swap(shape.size());
  for (int d = 0; d < ndim; ++d) {
    swap[static_cast<size_t>(d)] = d == axis ? ndim - 2 : d == ndim - 2 ? axis : d;
  }
  const bool moved = axis != ndim - 2;
  const int64_t points = u.has_input(1) ? int_scalar(u, 1) : shape[static_cast<size_t>(axis)];
  const ValueId lines = fit_length(u, moved ? u.transpose(x, swap) : x, points);
  const ValueId y = transform_last(u, lines, transform_of(points, onesided, inverse));
  u.set_output(0, moved ? u.transpose(y, swap) : y);
}

// STFT(signal [batch, length, parts], frame_step[, window][, frame_length])
//   -> [batch, frames, bins, 2]
void upgrade_stft(UpgradeContext& u) {
  const ValueId signal = u.input(0);
  const Shape shape = u.shape(signal);
  require_parts(u, shape);
  const int64_t step = int_scalar(u, 1);
  TRAINRT_REQUIRE(!u.has_input(2) || u.ndim(u.input(2)) == 1,
                  kInvalidModel,
                  "the window is ",
                  shape_string(u.shape(u.input(2))),
                  "; wanted one dim");
  const int64_t points = u.has_input(3)   ? int_scalar(u, 3)
                         : u.has_input(2) ? u.shape(u.input(2))[0]
                                          : 0;
  if (shape.size() != 3 || step < 1 || points < 1 || points > shape[1]) {
    u.fail(concat("frames of ", points, " at a step of ", step, " from ", shape_string(shape)));
  }
  const int64_t frames = 1 + (shape[1] - points) / step;
  std::vector<int64_t> places;
  for (int64_t f = 0; f < frames; ++f) {
    for (int64_t i = 0; i < points; ++i) {
      places.push_back(f * step + i);
    }
  }
  ValueId framed = u.op("Gather",
                        {signal, u.constant(Tensor::from(places, {frames, points}))},
                        {{"axis", int64_t{1}}});
  if (u.has_input(2)) {
    framed = u.mul(framed, u.reshape(u.input(2), {points, 1}));
  }
  const bool onesided = u.attributes().get_int("onesided", 1) != 0 && shape.back() == 1;
  u.set_output(0, transform_last(u, framed, transform_of(points, onesided, false)));
}

const RegisterUpgrade kDft{"DFT", upgrade_dft};
const RegisterUpgrade kStft{"STFT", upgrade_stft};

}  // namespace

}  // namespace trainrt
