// MaxPool and AveragePool over windows (attributes of ops/spatial.h, ceil_mode, count_include_pad):
//
//   MaxPool(x)          -> y[, indices]     indices: ONNX's flat int64 positions in x
//   MaxPoolGrad(x, dy)  -> dx               finds each window's maximum again instead of saving it
//   AveragePool(x)      -> y
//   AveragePoolGrad(dy) -> dx               `input_spatial`: the spatial sizes of x
//
// The first maximum of a window wins, as in PyTorch; NaN counts as larger than everything. A last
// window that starts in the end padding does not exist (see window_output).
//
// Every kernel takes one plane of one image and kLanes channels at a time: in nhwc these are
// contiguous and the inner loops vectorise, in nchw there is one lane. Planes are independent in
// the gradients too, so blocks of work never meet.
#include <algorithm>
#include <limits>

#include "graph/autodiff.h"
#include "graph/upgrade.h"
#include "ops/rows.h"
#include "ops/spatial.h"

namespace trainrt {

namespace {

constexpr int64_t kLanes = 32;

// The geometry of a pool: which elements of x the window of each output position covers.
struct Pool {
  Window window;
  ImageShape in;
  Shape out;
  bool count_include_pad = false;

  int64_t in_size() const { return num_elements(in.spatial); }
  int64_t out_size() const { return num_elements(out); }
  int64_t lane_stride() const { return window.channels_last ? in.c : 1; }  // per position
  int64_t lanes() const { return window.channels_last ? in.c : 1; }
  int64_t planes() const { return window.channels_last ? in.n : in.n * in.c; }
};

template <typename Context>
Pool pool_of(const Context& op) {
  Pool pool;
  pool.window = window_of(op.attributes());
  const bool last = pool.window.channels_last;
  pool.in = image_shape(op.input_shape(0), last);
  if (op.node().op_type == "AveragePoolGrad") {
    pool.out = pool.in.spatial;
    pool.in.spatial = op.attributes().get_ints("input_spatial");
  } else {
    pool.out =
        window_output(pool.window, pool.in.spatial, op.attributes().get_int("ceil_mode", 0) != 0);
  }
  pool.count_include_pad = op.attributes().get_int("count_include_pad", 0) != 0;
  return pool;
}

// The taps of one output position inside x: a box of positions with a step per dim.
struct Box {
  Shape begin, steps, count;  // first position, distance and number of taps per dim
  int64_t divisor = 1;        // of an average
};

// The taps of one dim of a window that starts at `start`: the first inside, how many are, and for
// how many an average counts them.
struct TapRange {
  int64_t first = 0, count = 0, divisor = 0;
};

TapRange find_taps(const Pool& pool, size_t d, int64_t start) {
  const Window& w = pool.window;
  const int64_t size = pool.in.spatial[d], step = w.dilations[d];
  TapRange taps;
  taps.first = start < 0 ? (-start + step - 1) / step : 0;
  const int64_t end = start >= size ? 0 : std::min(w.kernel[d], (size - start + step - 1) / step);
  taps.count = std::max<int64_t>(0, end - taps.first);
  // With ceil_mode a window may reach beyond the end padding; those taps never count.
  const int64_t limit = size + w.pads_end[d];
  taps.divisor = pool.count_include_pad ? std::min(w.kernel[d], (limit - start + step - 1) / step)
                                        : taps.count;
  return taps;
}

void find_box(const Pool& pool, int64_t position, Box& box) {
  const Window& w = pool.window;
  const size_t ndim = pool.out.size();
  box.begin.resize(ndim);
  box.count.resize(ndim);
  box.steps = w.dilations;
  int64_t divisor = 1;
  for (size_t d = ndim; d-- > 0;) {
    const int64_t start = position % pool.out[d] * w.strides[d] - w.pads_begin[d];
    position /= pool.out[d];
    const TapRange taps = find_taps(pool, d, start);
    box.begin[d] = start + taps.first * w.dilations[d];
    box.count[d] = taps.count;
    divisor *= taps.divisor;
  }
  box.divisor = std::max<int64_t>(1, divisor);
}

// Calls fn(position in x) for the taps of a box, first dim outermost.
template <typename Fn>
void for_each_tap(const Pool& pool, const Box& box, const Fn& fn) {
  const size_t ndim = box.begin.size();
  if (ndim == 2) {
    for (int64_t i = 0; i < box.count[0]; ++i) {
      const int64_t row = (box.begin[0] + i * box.steps[0]) * pool.in.spatial[1];
      for (int64_t j = 0; j < box.count[1]; ++j) {
        fn(row + box.begin[1] + j * box.steps[1]);
      }
    }
    return;
  }
  const int64_t total = num_elements(box.count);
  for (int64_t t = 0; t < total; ++t) {
    int64_t rest = t, position = 0, stride = 1;
    for (size_t d = ndim; d-- > 0;) {
      position += (box.begin[d] + rest % box.count[d] * box.steps[d]) * stride;
      rest /= box.count[d];
      stride *= pool.in.spatial[d];
    }
    fn(position);
  }
}

// One plane and up to kLanes channels of it: offsets of the first element in x and y.
struct Slice {
  int64_t plane = 0, lane = 0, width = 1;
  int64_t x = 0, y = 0;
};

// Calls fn(slice) for every slice, in parallel.
template <typename Fn>
void for_each_slice(KernelContext& op, const Pool& pool, const Fn& fn) {
  const int64_t groups = (pool.lanes() + kLanes - 1) / kLanes;
  const int64_t work = pool.in_size() * std::min(kLanes, pool.lanes());
  op.parallel_for(pool.planes() * groups, row_grain(work), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Slice slice;
      slice.plane = i / groups;
      slice.lane = i % groups * kLanes;
      slice.width = std::min(kLanes, pool.lanes() - slice.lane);
      slice.x = slice.plane * pool.in_size() * pool.lanes() + slice.lane;
      slice.y = slice.plane * pool.out_size() * pool.lanes() + slice.lane;
      fn(slice);
    }
  });
}

// ---- planes of two spatial dims in nchw --------------------------------------------------------
//
// There is one lane, so the vectors run along a row of outputs instead: tap after tap, in the order
// of for_each_tap, is applied to all outputs of the row that it serves.

constexpr int64_t kRowOutputs = 128;  // outputs of a row at a time

bool is_planar(const Pool& pool) {
  return !pool.window.channels_last && pool.out.size() == 2;
}

// Calls fn(input position of output `first`, first, last, stride) for each tap of the outputs
// [begin, end) of row oy, where output j reads position + (j - first) * stride.
template <typename Fn>
void for_each_row_tap(const Pool& pool, int64_t oy, int64_t begin, int64_t end, const Fn& fn) {
  const Window& w = pool.window;
  const int64_t height = pool.in.spatial[0], width = pool.in.spatial[1];
  const int64_t stride = w.strides[1];
  for (int64_t ky = 0; ky < w.kernel[0]; ++ky) {
    const int64_t iy = oy * w.strides[0] - w.pads_begin[0] + ky * w.dilations[0];
    if (iy < 0 || iy >= height) {
      continue;
    }
    for (int64_t kx = 0; kx < w.kernel[1]; ++kx) {
      const int64_t shift = kx * w.dilations[1] - w.pads_begin[1];  // ix = ox * stride + shift
      const int64_t first = std::max(begin, shift < 0 ? (-shift + stride - 1) / stride : 0);
      const int64_t last = std::min(end, width <= shift ? 0 : (width - shift - 1) / stride + 1);
      if (first < last) {
        fn(iy * width + first * stride + shift, first, last, stride);
      }
    }
  }
}

// Maxima of outputs [begin, end) of row oy of a plane, and their positions (-1 before any tap).
template <typename C, typename T>
void max_of_row(
    const Pool& pool, const T* x, int64_t oy, int64_t begin, int64_t end, C* best, int32_t* at) {
  std::fill(best, best + (end - begin), -std::numeric_limits<C>::infinity());
  std::fill(at, at + (end - begin), -1);
  for_each_row_tap(
      pool, oy, begin, end, [&](int64_t position, int64_t first, int64_t last, int64_t stride) {
        C* row = best + (first - begin);
        int32_t* row_at = at + (first - begin);
        const T* tap = x + position;
        const int32_t from = static_cast<int32_t>(position), step = static_cast<int32_t>(stride);
        const int32_t n = static_cast<int32_t>(last - first);
#pragma omp simd
        for (int32_t j = 0; j < n; ++j) {
          const C value = load<C>(tap[j * step]);
          const bool better =
              (row_at[j] < 0) | (!(value <= row[j]) & (row[j] == row[j]));  // NaN wins and stays
          row[j] = better ? value : row[j];
          row_at[j] = better ? from + j * step : row_at[j];
        }
      });
}

// Calls fn(plane's slice, oy, begin, end) for all pieces of rows of a plane.
template <typename Fn>
void for_each_row_piece(const Pool& pool, const Fn& fn) {
  for (int64_t oy = 0; oy < pool.out[0]; ++oy) {
    for (int64_t begin = 0; begin < pool.out[1]; begin += kRowOutputs) {
      fn(oy, begin, std::min(pool.out[1], begin + kRowOutputs));
    }
  }
}

template <typename C, typename T>
void max_pool_plane(const Pool& pool, const Slice& slice, const T* x, T* y, int64_t* indices) {
  C best[kRowOutputs];
  int32_t at[kRowOutputs];
  for_each_row_piece(pool, [&](int64_t oy, int64_t begin, int64_t end) {
    max_of_row(pool, x + slice.x, oy, begin, end, best, at);
    const int64_t offset = slice.y + oy * pool.out[1] + begin;
    for (int64_t j = 0; j < end - begin; ++j) {
      y[offset + j] = store<T>(best[j]);
      if (indices != nullptr) {
        indices[offset + j] = slice.x + std::max(at[j], 0);
      }
    }
  });
}

template <typename C, typename T>
void max_pool_grad_plane(const Pool& pool, const Slice& slice, const T* x, const T* dy, T* dx) {
  C best[kRowOutputs];
  int32_t at[kRowOutputs];
  std::fill(dx + slice.x, dx + slice.x + pool.in_size(), store<T>(C(0)));
  for_each_row_piece(pool, [&](int64_t oy, int64_t begin, int64_t end) {
    max_of_row(pool, x + slice.x, oy, begin, end, best, at);
    const T* grad = dy + slice.y + oy * pool.out[1] + begin;
    for (int64_t j = 0; j < end - begin; ++j) {
      T& target = dx[slice.x + std::max(at[j], 0)];
      target = store<T>(load<C>(target) + load<C>(grad[j]));
    }
  });
}

template <typename C, typename T>
void average_pool_plane(const Pool& pool, const Slice& slice, const T* x, T* y) {
  double sum[kRowOutputs];
  for_each_row_piece(pool, [&](int64_t oy, int64_t begin, int64_t end) {
    std::fill(sum, sum + (end - begin), 0.0);
    for_each_row_tap(
        pool, oy, begin, end, [&](int64_t position, int64_t first, int64_t last, int64_t stride) {
          double* row = sum + (first - begin);
          const T* tap = x + slice.x + position;
#pragma omp simd
          for (int64_t j = 0; j < last - first; ++j) {
            row[j] += load<double>(tap[j * stride]);
          }
        });
    const Window& w = pool.window;
    const int64_t rows = find_taps(pool, 0, oy * w.strides[0] - w.pads_begin[0]).divisor;
    for (int64_t ox = begin; ox < end; ++ox) {
      const int64_t columns = find_taps(pool, 1, ox * w.strides[1] - w.pads_begin[1]).divisor;
      const double divisor = static_cast<double>(std::max<int64_t>(1, rows * columns));
      y[slice.y + oy * pool.out[1] + ox] = store<T>(static_cast<C>(sum[ox - begin] / divisor));
    }
  });
}

// ---- any number of dims, any layout -----------------------------------------------------------

// Maximum and its position per lane.
template <typename C, typename T>
void max_of_box(const Pool& pool, const Box& box, const T* x, int64_t width, C* best, int64_t* at) {
  std::fill(best, best + width, -std::numeric_limits<C>::infinity());
  bool first = true;
  for_each_tap(pool, box, [&](int64_t position) {
    const T* tap = x + position * pool.lane_stride();
    for (int64_t j = 0; j < width; ++j) {
      const C value = load<C>(tap[j]);
      // Not "value > best": NaN wins, and stays.
      const bool better = first || (!(value <= best[j]) && best[j] == best[j]);
      best[j] = better ? value : best[j];
      at[j] = better ? position : at[j];
    }
    first = false;
  });
}

// C is double in reference kernels, else the type of computation.
template <typename C, typename T>
void max_pool(KernelContext& op) {
  const Pool pool = pool_of(op);
  const T* x = op.input<T>(0);
  T* y = op.output<T>(0);
  int64_t* indices = op.output<int64_t>(1);
  for_each_slice(op, pool, [&](const Slice& slice) {
    if (is_planar(pool)) {
      max_pool_plane<C>(pool, slice, x, y, indices);
      return;
    }
    Box box;
    C best[kLanes];
    int64_t at[kLanes] = {};
    for (int64_t p = 0; p < pool.out_size(); ++p) {
      find_box(pool, p, box);
      max_of_box<C>(pool, box, x + slice.x, slice.width, best, at);
      const int64_t offset = slice.y + p * pool.lane_stride();
      for (int64_t j = 0; j < slice.width; ++j) {
        y[offset + j] = store<T>(best[j]);
        if (indices != nullptr) {
          indices[offset + j] = slice.x + j + at[j] * pool.lane_stride();
        }
      }
    }
  });
}

template <typename C, typename T>
void max_pool_grad(KernelContext& op) {
  const Pool pool = pool_of(op);
  const T* x = op.input<T>(0);
  const T* dy = op.input<T>(1);
  T* dx = op.output<T>(0);
  for_each_slice(op, pool, [&](const Slice& slice) {
    if (is_planar(pool)) {
      max_pool_grad_plane<C>(pool, slice, x, dy, dx);
      return;
    }
    Box box;
    C best[kLanes];
    int64_t at[kLanes] = {};
    T* plane = dx + slice.x;
    for (int64_t p = 0; p < pool.in_size(); ++p) {
      std::fill(plane + p * pool.lane_stride(),
                plane + p * pool.lane_stride() + slice.width,
                store<T>(C(0)));
    }
    for (int64_t p = 0; p < pool.out_size(); ++p) {
      find_box(pool, p, box);
      max_of_box<C>(pool, box, x + slice.x, slice.width, best, at);
      const T* grad = dy + slice.y + p * pool.lane_stride();
      for (int64_t j = 0; j < slice.width; ++j) {
        T& target = plane[at[j] * pool.lane_stride() + j];
        target = store<T>(load<C>(target) + load<C>(grad[j]));
      }
    }
  });
}

template <typename C, typename T>
void average_pool(KernelContext& op) {
  const Pool pool = pool_of(op);
  const T* x = op.input<T>(0);
  T* y = op.output<T>(0);
  for_each_slice(op, pool, [&](const Slice& slice) {
    if (is_planar(pool)) {
      average_pool_plane<C>(pool, slice, x, y);
      return;
    }
    Box box;
    double sum[kLanes];
    for (int64_t p = 0; p < pool.out_size(); ++p) {
      find_box(pool, p, box);
      std::fill(sum, sum + slice.width, 0.0);
      for_each_tap(pool, box, [&](int64_t position) {
        const T* tap = x + slice.x + position * pool.lane_stride();
        for (int64_t j = 0; j < slice.width; ++j) {
          sum[j] += load<double>(tap[j]);
        }
      });
      for (int64_t j = 0; j < slice.width; ++j) {
        y[slice.y + p * pool.lane_stride() + j] =
            store<T>(static_cast<C>(sum[j] / static_cast<double>(box.divisor)));
      }
    }
  });
}

template <typename C, typename T>
void average_pool_grad(KernelContext& op) {
  const Pool pool = pool_of(op);
  const T* dy = op.input<T>(0);
  T* dx = op.output<T>(0);
  for_each_slice(op, pool, [&](const Slice& slice) {
    Box box;
    T* plane = dx + slice.x;
    for (int64_t p = 0; p < pool.in_size(); ++p) {
      std::fill(plane + p * pool.lane_stride(),
                plane + p * pool.lane_stride() + slice.width,
                store<T>(C(0)));
    }
    for (int64_t p = 0; p < pool.out_size(); ++p) {
      find_box(pool, p, box);
      const T* grad = dy + slice.y + p * pool.lane_stride();
      const C factor = C(1) / static_cast<C>(box.divisor);
      for_each_tap(pool, box, [&](int64_t position) {
        T* target = plane + position * pool.lane_stride();
        for (int64_t j = 0; j < slice.width; ++j) {
          target[j] = store<T>(load<C>(target[j]) + load<C>(grad[j]) * factor);
        }
      });
    }
  });
}

// ---- description -----------------------------------------------------------------------------

// "n c s0 s1" with spatial dims of prefix.
std::string image_dims(const Window& window, const char* prefix) {
  const std::string spatial = dim_names(prefix, window.ndim());
  return window.channels_last ? concat("n ", spatial, " c") : concat("n c ", spatial);
}

// `in` inputs shaped like x, then one like y if `grad_input`, to `out`.
ShardingRule sharding(const OpContext& op) {
  const Pool pool = pool_of(op);
  const std::string x = image_dims(pool.window, "s"), y = image_dims(pool.window, "o");
  const std::string& type = op.node().op_type;
  std::string equation;
  if (type == "MaxPool") {
    equation = concat(x, " -> ", y, op.num_outputs() > 1 ? ", " + y : "");
  } else if (type == "MaxPoolGrad") {
    equation = concat(x, ", ", y, " -> ", x);
  } else if (type == "AveragePool") {
    equation = concat(x, " -> ", y);
  } else {
    equation = concat(y, " -> ", x);
  }
  Factors factors(op, equation);
  for (int d = 0; d < pool.window.ndim(); ++d) {
    factors.whole(concat("s", d)).whole(concat("o", d));
  }
  // Flat positions count whole planes and images: a shard would count its own.
  if (type == "MaxPool" && op.num_outputs() > 1 && op.has_output(1) && !op.node().outputs.empty()) {
    factors.whole("n").whole("c");
  }
  if (type != "MaxPool") {
    factors.linear({{type == "MaxPoolGrad" ? 1 : 0}});
  }
  return factors;
}

TensorTypes infer(const OpContext& op) {
  require_real(op);
  const Pool pool = pool_of(op);
  const bool last = pool.window.channels_last;
  const std::string& type = op.node().op_type;
  const TensorType x{op.input_dtype(0), to_shape(pool.in, last)};
  const TensorType y{op.input_dtype(0), to_shape({pool.in.n, pool.in.c, pool.out}, last)};
  if (type == "MaxPool") {
    return {y, {DType::kInt64, y.shape}};
  }
  if (type == "AveragePool") {
    return {y};
  }
  if (type == "MaxPoolGrad") {
    TRAINRT_REQUIRE(op.input_type(1) == y,
                    kInvalidModel,
                    "MaxPoolGrad: dy is ",
                    shape_string(op.input_shape(1)),
                    ", wanted ",
                    shape_string(y.shape));
  }
  return {x};
}

void max_pool_gradient(GradientBuilder& g) {
  if (g.output_grad(0) != kNoValue) {
    g.set_input_grad(0, g.op("MaxPoolGrad", {g.input(0), g.output_grad(0)}, g.attributes()));
  }
}

void average_pool_gradient(GradientBuilder& g) {
  Attributes attributes = g.attributes();
  const bool last = attributes.get_string("layout", "nchw") == "nhwc";
  attributes.set("input_spatial", image_shape(g.input_shape(0), last).spatial);
  g.set_input_grad(0, g.op("AveragePoolGrad", {g.output_grad(0)}, attributes));
}

Attributes pool_attributes(UpgradeContext& u) {
  if (!is_floating(u.dtype(u.input(0)))) {
    u.fail(concat("only floating-point tensors are pooled, got ", dtype_name(u.dtype(u.input(0)))));
  }
  const Shape x = u.shape(u.input(0));
  if (x.size() < 3) {
    u.fail(concat("x must be [n, c, spatial...], got ", shape_string(x)));
  }
  if (!u.attributes().has("kernel_shape")) {
    u.fail("attribute kernel_shape is missing");
  }
  Attributes attributes = explicit_window(u, {x.begin() + 2, x.end()}, {});
  for (const char* name : {"ceil_mode", "count_include_pad"}) {
    if (u.attributes().get_int(name, 0) != 0) {
      attributes.set(name, int64_t{1});
    }
  }
  return attributes;
}

void upgrade_max_pool(UpgradeContext& u) {
  Attributes attributes = pool_attributes(u);
  attributes.erase("count_include_pad");
  if (u.wants_output(1) && u.attributes().get_int("storage_order", 0) != 0) {
    u.fail("indices in column-major storage_order are not supported");
  }
  u.set_outputs(u.emit("MaxPool", {u.input(0)}, attributes));
}

void upgrade_average_pool(UpgradeContext& u) {
  u.set_outputs(u.emit("AveragePool", {u.input(0)}, pool_attributes(u)));
}

// (sum |x|^p)^(1/p): the average with padding counted, times the size of the window.
void upgrade_lp_pool(UpgradeContext& u) {
  Attributes attributes = pool_attributes(u);
  attributes.set("count_include_pad", int64_t{1});
  const double p = u.attributes().get_float("p", 2);
  if (u.attributes().get_int("ceil_mode", 0) != 0) {
    u.fail("ceil_mode is not supported");
  }
  const double taps = static_cast<double>(num_elements(attributes.get_ints("kernel_shape")));
  const DType dtype = u.dtype(u.input(0));
  const ValueId powers = u.op("Pow", {u.op("Abs", {u.input(0)}), u.scalar(p, dtype)});
  const ValueId sums = u.mul(u.emit("AveragePool", {powers}, attributes).at(0), taps);
  u.set_output(0, u.op("Pow", {sums, u.scalar(1 / p, dtype)}));
}

// Global pools are reductions over the spatial dims.
void upgrade_global(UpgradeContext& u, const char* reduction) {
  std::vector<int64_t> axes;
  for (int d = 2; d < u.ndim(u.input(0)); ++d) {
    axes.push_back(d);
  }
  u.set_outputs(u.emit(reduction, {u.input(0)}, {{"axes", axes}, {"keepdims", int64_t{1}}}));
}

void upgrade_global_lp(UpgradeContext& u) {
  const double p = u.attributes().get_float("p", 2);
  const DType dtype = u.dtype(u.input(0));
  std::vector<int64_t> axes;
  for (int d = 2; d < u.ndim(u.input(0)); ++d) {
    axes.push_back(d);
  }
  const ValueId powers = u.op("Pow", {u.op("Abs", {u.input(0)}), u.scalar(p, dtype)});
  u.set_output(0, u.op("Pow", {u.reduce_sum(powers, axes), u.scalar(1 / p, dtype)}));
}

// A permutation of distinct values: finite differences of a maximum need a gap.
Tensor distinct_values(const Shape& shape) {
  std::vector<float> values(static_cast<size_t>(num_elements(shape)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = static_cast<float>(i * 7919 % values.size()) / static_cast<float>(values.size());
  }
  return Tensor::from(values, shape);
}

std::vector<OpExample> examples(const std::string& type) {
  struct Case {
    const char* name;
    Shape x, kernel, strides, dilations, pads;
    int64_t ceil_mode, count_include_pad;
    const char* layout;
  };
  const std::vector<Case> cases = {
      {"halves", {2, 4, 6, 8}, {2, 2}, {2, 2}, {1, 1}, {0, 0, 0, 0}, 0, 0, "nchw"},
      {"overlapping", {2, 2, 7, 7}, {3, 3}, {2, 2}, {1, 1}, {1, 1, 1, 1}, 0, 0, "nchw"},
      {"ceil", {1, 2, 7, 6}, {3, 3}, {2, 2}, {1, 1}, {0, 1, 0, 1}, 1, 1, "nchw"},
      {"dilated", {1, 2, 8, 8}, {2, 3}, {1, 2}, {2, 2}, {1, 0, 0, 1}, 0, 1, "nchw"},
      {"one_dim", {2, 3, 9}, {3}, {2}, {1}, {1, 0}, 0, 0, "nchw"},
      {"three_dims",
       {1, 2, 4, 4, 5},
       {2, 2, 2},
       {1, 2, 2},
       {1, 1, 1},
       {0, 0, 0, 0, 0, 1},
       0,
       0,
       "nchw"},
      {"channels_last", {2, 7, 6, 40}, {3, 3}, {2, 2}, {1, 1}, {1, 1, 1, 1}, 0, 0, "nhwc"},
  };
  std::vector<OpExample> list;
  for (const Case& c : cases) {
    OpExample example;
    example.name = c.name;
    example.attributes = {{"kernel_shape", c.kernel},
                          {"strides", c.strides},
                          {"dilations", c.dilations},
                          {"pads", c.pads},
                          {"ceil_mode", c.ceil_mode},
                          {"count_include_pad", c.count_include_pad},
                          {"layout", std::string(c.layout)}};
    const bool last = example.attributes.get_string("layout") == "nhwc";
    const ImageShape image = image_shape(c.x, last);
    const Shape out = window_output(window_of(example.attributes), image.spatial, c.ceil_mode != 0);
    const TensorType x{DType::kFloat32, c.x};
    const TensorType y{DType::kFloat32, to_shape({image.n, image.c, out}, last)};
    if (type == "AveragePoolGrad") {
      example.attributes.set("input_spatial", image.spatial);
      example.inputs = {y};
    } else if (type == "MaxPoolGrad") {
      example.inputs = {x, y};
      example.values = {distinct_values(c.x), Tensor()};
    } else {
      example.inputs = {x};
      if (type == "MaxPool") {
        example.values = {distinct_values(c.x)};
        example.check_gradient = {0};
      }
    }
    example.check_sharding = type != "MaxPool";  // indices count whole images
    list.push_back(std::move(example));
  }
  return list;
}

template <typename Fn>
Kernel by_dtype(Fn fn) {
  return
      [fn](KernelContext& op) { dispatch_real(op.input_dtype(0), [&](auto tag) { fn(tag, op); }); };
}

OpDef pool_op(const char* name) {
  OpDef op;
  op.name = name;
  op.infer_types = infer;
  op.cost = [](const OpContext& context) {
    const Window window = window_of(context.attributes());
    return memory_bound_cost(context, static_cast<double>(num_elements(window.kernel)));
  };
  op.sharding = sharding;
  op.precision = PrecisionRule::kFollow;
  op.examples = examples(name);
  return op;
}

// The plain loops are the fast ones in another type.
#define TRAINRT_POOL_KERNELS(op, kernel)                                                          \
  (op).reference_kernel =                                                                         \
      by_dtype([](auto tag, KernelContext& context) { kernel<double, decltype(tag)>(context); }); \
  (op).cpu_kernel = by_dtype([](auto tag, KernelContext& context) {                               \
    kernel<Compute<decltype(tag)>, decltype(tag)>(context);                                       \
  })

OpDef max_pool_op() {
  OpDef op = pool_op("MaxPool");
  TRAINRT_POOL_KERNELS(op, max_pool);
  op.gradient = max_pool_gradient;
  op.upgrade = upgrade_max_pool;
  return op;
}

OpDef max_pool_grad_op() {
  OpDef op = pool_op("MaxPoolGrad");
  TRAINRT_POOL_KERNELS(op, max_pool_grad);
  return op;
}

OpDef average_pool_op() {
  OpDef op = pool_op("AveragePool");
  TRAINRT_POOL_KERNELS(op, average_pool);
  op.gradient = average_pool_gradient;
  op.upgrade = upgrade_average_pool;
  return op;
}

OpDef average_pool_grad_op() {
  OpDef op = pool_op("AveragePoolGrad");
  TRAINRT_POOL_KERNELS(op, average_pool_grad);
  return op;
}
#undef TRAINRT_POOL_KERNELS

const RegisterOp kMaxPool{max_pool_op()};
const RegisterOp kMaxPoolGrad{max_pool_grad_op()};
const RegisterOp kAveragePool{average_pool_op()};
const RegisterOp kAveragePoolGrad{average_pool_grad_op()};
const RegisterUpgrade kLpPool{"LpPool", upgrade_lp_pool};
const RegisterUpgrade kGlobalAverage{"GlobalAveragePool",
                                     [](UpgradeContext& u) { upgrade_global(u, "ReduceMean"); }};
const RegisterUpgrade kGlobalMax{"GlobalMaxPool",
                                 [](UpgradeContext& u) { upgrade_global(u, "ReduceMax"); }};
const RegisterUpgrade kGlobalLp{"GlobalLpPool", upgrade_global_lp};

}  // namespace

}  // namespace trainrt
