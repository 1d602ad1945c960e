// Every kernel walks windows, and takes for each the elements of up to kLanes channels at a time:
// channels-last these lie side by side and the inner loops vectorise; in ONNX order there is one
// lane (graph/passes/layout turns images before it comes to that). Where a window lies inside the
// image is looked up per dim.
//
// Forward kernels cut work by rows of outputs. Windows of gradients overlap, so these are cut by
// image and group of lanes, and blocks of work never meet.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "ops/pool.h"
#include "ops/rows.h"
#include "ops/vectors.h"

namespace trainrt::pool {

namespace {

constexpr int64_t kLanes = 64;

// The taps that one output coordinate reads along one dim: where the first inside the image lies,
// which tap of the window it is, and how many follow.
struct TapRange {
  int64_t begin = 0, first = 0, count = 0;
  int64_t divisor = 0;  // how many an average counts
};

struct Axis {
  int64_t in = 1, kernel = 1, dilation = 1;
  std::vector<TapRange> taps = {{0, 0, 1, 1}};  // by output coordinate
};

Axis make_axis(const Pool& pool, size_t d) {
  const Window& w = pool.window;
  Axis axis{pool.in.spatial[d], w.kernel[d], w.dilations[d], {}};
  const int64_t step = axis.dilation;
  for (int64_t o = 0; o < pool.out[d]; ++o) {
    const int64_t start = o * w.strides[d] - w.pads_begin[d];
    TapRange taps;
    taps.first = start < 0 ? (-start + step - 1) / step : 0;
    const int64_t end =
        start >= axis.in ? 0 : std::min(axis.kernel, (axis.in - start + step - 1) / step);
    taps.count = std::max<int64_t>(0, end - taps.first);
    taps.begin = start + taps.first * step;
    // With ceil_mode a window may reach beyond the end padding; those taps never count.
    const int64_t limit = axis.in + w.pads_end[d];
    taps.divisor = pool.count_include_pad ? std::min(axis.kernel, (limit - start + step - 1) / step)
                                          : taps.count;
    axis.taps.push_back(taps);
  }
  return axis;
}

class Windows {
 public:
  explicit Windows(const Pool& pool) {
    const size_t ndim = pool.out.size();
    for (size_t d = 0; d < ndim; ++d) {
      axes_[3 - ndim + d] = make_axis(pool, d);
    }
    const bool last = pool.window.channels_last;
    lanes_ = last ? pool.in.c : 1;
    planes_ = last ? pool.in.n : pool.in.n * pool.in.c;
    in_size_ = num_elements(pool.in.spatial);
    out_size_ = num_elements(pool.out);
  }

  int64_t planes() const { return planes_; }
  int64_t lanes() const { return lanes_; }
  int64_t in_size() const { return in_size_; }
  int64_t out_size() const { return out_size_; }
  int64_t rows() const { return size(0) * size(1); }  // of outputs, in a plane
  int64_t taps() const { return axes_[0].kernel * axes_[1].kernel * axes_[2].kernel; }

  // Calls fn(offset of output, window) along row `row` of a plane.
  template <typename Fn>
  void for_each_window(int64_t row, const Fn& fn) const {
    const TapRange& depth = axes_[0].taps[static_cast<size_t>(row / size(1))];
    const TapRange& height = axes_[1].taps[static_cast<size_t>(row % size(1))];
    for (int64_t o = 0; o < size(2); ++o) {
      const std::array<const TapRange*, 3> window = {
          &depth, &height, &axes_[2].taps[static_cast<size_t>(o)]};
      fn((row * size(2) + o) * lanes_, window);
    }
  }

  // Calls fn(offset in x, tap) for the taps inside the image.
  template <typename Fn>
  void for_each_tap(const std::array<const TapRange*, 3>& window, const Fn& fn) const {
    const TapRange &a = *window[0], &b = *window[1], &c = *window[2];
    for (int64_t i = 0; i < a.count; ++i) {
      const int64_t plane = (a.begin + i * axes_[0].dilation) * axes_[1].in;
      for (int64_t j = 0; j < b.count; ++j) {
        const int64_t line = (plane + b.begin + j * axes_[1].dilation) * axes_[2].in;
        const int64_t tap = ((a.first + i) * axes_[1].kernel + b.first + j) * axes_[2].kernel;
        for (int64_t k = 0; k < c.count; ++k) {
          fn((line + c.begin + k * axes_[2].dilation) * lanes_, tap + c.first + k);
        }
      }
    }
  }

  int64_t first_tap(const std::array<const TapRange*, 3>& window) const {
    return (window[0]->first * axes_[1].kernel + window[1]->first) * axes_[2].kernel +
           window[2]->first;
  }

  static int64_t divisor(const std::array<const TapRange*, 3>& window) {
    return std::max<int64_t>(1, window[0]->divisor * window[1]->divisor * window[2]->divisor);
  }

 private:
  int64_t size(size_t d) const { return static_cast<int64_t>(axes_[d].taps.size()); }

  std::array<Axis, 3> axes_;
  int64_t planes_ = 0, lanes_ = 1, in_size_ = 0, out_size_ = 0;
};

// Calls fn(offset of x, offset of y, window, first lane, number of lanes) for all windows: a
// forward kernel's loop.
template <typename Fn>
void for_each_output(KernelContext& op, const Windows& windows, const Fn& fn) {
  const int64_t rows = windows.rows();
  const int64_t row_work = windows.out_size() / std::max<int64_t>(1, rows) * windows.lanes();
  op.parallel_for(
      windows.planes() * rows,
      row_grain(row_work * windows.taps()),
      [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          const int64_t plane = r / rows * windows.lanes();
          const int64_t x = plane * windows.in_size(), y = plane * windows.out_size();
          windows.for_each_window(r % rows, [&](int64_t offset, const auto& window) {
            for (int64_t lane = 0; lane < windows.lanes(); lane += kLanes) {
              fn(x + lane, y + offset + lane, window, std::min(kLanes, windows.lanes() - lane));
            }
          });
        }
      });
}

// The same for a gradient: dx of the block is cleared, then fn adds to it.
template <typename T, typename Fn>
void for_each_input(KernelContext& op, const Windows& windows, T* dx, const Fn& fn) {
  const int64_t groups = (windows.lanes() + kLanes - 1) / kLanes;
  const int64_t work = windows.in_size() * std::min(kLanes, windows.lanes());
  op.parallel_for(windows.planes() * groups, row_grain(work), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t plane = i / groups * windows.lanes(), lane = i % groups * kLanes;
      const int64_t width = std::min(kLanes, windows.lanes() - lane);
      T* target = dx + plane * windows.in_size() + lane;
      const bool dense = width == windows.lanes();
      const int64_t runs = dense ? 1 : windows.in_size();
      for (int64_t p = 0; p < runs; ++p) {
        std::fill_n(target + p * windows.lanes(),
                    dense ? windows.in_size() * width : width,
                    store<T>(0.0f));
      }
      const int64_t y = plane * windows.out_size() + lane;
      for (int64_t row = 0; row < windows.rows(); ++row) {
        windows.for_each_window(row, [&](int64_t offset, const auto& window) {
          fn(target, y + offset, window, width);
        });
      }
    }
  });
}

template <typename Fn>
void dispatch_tap(DType dtype, const Fn& fn) {
  if (dtype == DType::kUInt8) {
    fn(uint8_t{});
  } else {
    fn(int32_t{});
  }
}

// ---- lanes in registers ------------------------------------------------------------------------
//
// Bytes beside floats make the compiler's own vectors too wide for few channels, so kernels with
// taps say what a register holds: kVector<float> lanes, or one of another type.

template <typename V>
constexpr bool is_vector = !std::is_arithmetic_v<V>;

template <typename Element, typename V>
struct LanesOf {
  typedef Element type __attribute__((vector_size(kVector<float> * sizeof(Element))));
};
template <typename Element>
struct LanesOf<Element, float> {
  using type = Element;
};
template <typename Element>
struct LanesOf<Element, double> {
  using type = Element;
};
template <typename V>
using TapNumbers = typename LanesOf<int32_t, V>::type;

// Calls fn(V{}, lane) such that lanes [0, width) are covered.
template <typename C, typename Fn>
void for_each_register(int64_t width, const Fn& fn) {
  int64_t j = 0;
  if constexpr (std::is_same_v<C, float>) {
    for (; j + kVector<float> <= width; j += kVector<float>) {
      fn(Vector<float>{}, j);
    }
  }
  for (; j < width; ++j) {
    fn(C{}, j);
  }
}

template <typename V, typename T>
V load_lanes(const T* from) {
  if constexpr (!is_vector<V>) {
    return load<V>(*from);
  } else if constexpr (std::is_same_v<T, float>) {
    return load_vector(from);
  } else {
    float lanes[kVector<float>];
    for (int64_t i = 0; i < kVector<float>; ++i) {
      lanes[i] = load<float>(from[i]);
    }
    return load_vector(lanes);
  }
}

template <typename V, typename T>
void store_lanes(T* to, V value) {
  if constexpr (!is_vector<V>) {
    *to = store<T>(value);
  } else if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, &value, sizeof(value));
  } else {
    for (int64_t i = 0; i < kVector<float>; ++i) {
      to[i] = store<T>(static_cast<float>(value[i]));
    }
  }
}

template <typename V, typename Tap>
TapNumbers<V> load_taps(const Tap* from) {
  typename LanesOf<Tap, V>::type taps;
  std::memcpy(&taps, from, sizeof(taps));
  if constexpr (is_vector<V>) {
    return __builtin_convertvector(taps, TapNumbers<V>);
  } else {
    return taps;
  }
}

template <typename V, typename Tap>
void store_taps(Tap* to, TapNumbers<V> numbers) {
  using Taps = typename LanesOf<Tap, V>::type;
  Taps taps;
  if constexpr (is_vector<V>) {
    taps = __builtin_convertvector(numbers, Taps);
  } else {
    taps = static_cast<Tap>(numbers);
  }
  std::memcpy(to, &taps, sizeof(taps));
}

// C is double in reference kernels, else the type of computation.
template <typename C, typename T, typename Tap>
void max_pool(KernelContext& op, Tap* taps) {
  const Windows windows(pool_of(op));
  const T* x = op.input<T>(0);
  T* y = op.output<T>(0);
  int64_t* indices = op.output<int64_t>(1);
  for_each_output(op, windows, [&](int64_t from, int64_t to, const auto& window, int64_t width) {
    // Where all are -infinity the first tap inside the image is the maximum.
    const int32_t first = static_cast<int32_t>(windows.first_tap(window));
    for_each_register<C>(width, [&](auto tag, int64_t j) {
      using V = decltype(tag);
      V best = V{} - std::numeric_limits<C>::infinity();
      TapNumbers<V> at = TapNumbers<V>{} + first;
      windows.for_each_tap(window, [&](int64_t position, int64_t t) {
        const V value = load_lanes<V>(x + from + position + j);
        const auto keep = (value <= best) | (best != best);  // NaN wins and stays
        best = keep ? best : value;
        at = keep ? at : TapNumbers<V>{} + static_cast<int32_t>(t);
      });
      store_lanes(y + to + j, best);
      if (taps != nullptr) {
        store_taps<V>(taps + to + j, at);
      }
      if (indices != nullptr) {
        int32_t lanes[sizeof(at) / sizeof(int32_t)];
        std::memcpy(lanes, &at, sizeof(at));
        windows.for_each_tap(window, [&](int64_t position, int64_t t) {
          for (size_t i = 0; i < std::size(lanes); ++i) {
            const int64_t lane = j + static_cast<int64_t>(i);
            indices[to + lane] = lanes[i] == t ? from + position + lane : indices[to + lane];
          }
        });
      }
    });
  });
}

template <typename C, typename T>
void max_pool(KernelContext& op) {
  if (op.has_output(2)) {
    dispatch_tap(op.output_dtype(2),
                 [&](auto tag) { max_pool<C, T>(op, op.output<decltype(tag)>(2)); });
  } else {
    max_pool<C, T>(op, static_cast<uint8_t*>(nullptr));
  }
}

template <typename C, typename T>
void max_pool_grad(KernelContext& op) {
  const Windows windows(pool_of(op));
  const T* dy = op.input<T>(1);
  dispatch_tap(op.input_dtype(0), [&](auto tap) {
    const auto* taps = op.input<decltype(tap)>(0);
    for_each_input(
        op, windows, op.output<T>(0), [&](T* dx, int64_t at, const auto& window, int64_t width) {
          for_each_register<C>(width, [&](auto tag, int64_t j) {
            using V = decltype(tag);
            const V grad = load_lanes<V>(dy + at + j);
            const TapNumbers<V> largest = load_taps<V>(taps + at + j);
            windows.for_each_tap(window, [&](int64_t position, int64_t t) {
              const auto is_largest = largest == static_cast<int32_t>(t);
              T* target = dx + position + j;
              store_lanes(target, load_lanes<V>(target) + (is_largest ? grad : V{}));
            });
          });
        });
  });
}

template <typename C, typename T>
void average_pool(KernelContext& op) {
  const Windows windows(pool_of(op));
  const T* x = op.input<T>(0);
  T* y = op.output<T>(0);
  for_each_output(op, windows, [&](int64_t from, int64_t to, const auto& window, int64_t width) {
    C sum[kLanes];
    std::fill_n(sum, width, C(0));
    windows.for_each_tap(window, [&](int64_t position, int64_t) {
      const T* values = x + from + position;
#pragma omp simd
      for (int64_t j = 0; j < width; ++j) {
        sum[j] += load<C>(values[j]);
      }
    });
    const C factor = C(1) / static_cast<C>(Windows::divisor(window));
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      y[to + j] = store<T>(sum[j] * factor);
    }
  });
}

template <typename C, typename T>
void average_pool_grad(KernelContext& op) {
  const Windows windows(pool_of(op));
  const T* dy = op.input<T>(0);
  for_each_input(
      op, windows, op.output<T>(0), [&](T* dx, int64_t at, const auto& window, int64_t width) {
        const C factor = C(1) / static_cast<C>(Windows::divisor(window));
        windows.for_each_tap(window, [&](int64_t position, int64_t) {
          T* target = dx + position;
#pragma omp simd
          for (int64_t j = 0; j < width; ++j) {
            target[j] = store<T>(load<C>(target[j]) + load<C>(dy[at + j]) * factor);
          }
        });
      });
}

template <bool kFast>
void run(const std::string& op_type, KernelContext& op) {
  const DType dtype = op_type == "MaxPoolGrad" ? op.input_dtype(1) : op.input_dtype(0);
  dispatch_real(dtype, [&](auto tag) {
    using T = decltype(tag);
    using C = std::conditional_t<kFast, Compute<T>, double>;
    if (op_type == "MaxPool") {
      max_pool<C, T>(op);
    } else if (op_type == "MaxPoolGrad") {
      max_pool_grad<C, T>(op);
    } else if (op_type == "AveragePool") {
      average_pool<C, T>(op);
    } else {
      average_pool_grad<C, T>(op);
    }
  });
}

}  // namespace

Kernel kernel_of(const std::string& op_type, bool fast) {
  return [op_type, fast](KernelContext& op) {
    fast ? run<true>(op_type, op) : run<false>(op_type, op);
  };
}

}  // namespace trainrt::pool
