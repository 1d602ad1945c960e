// CUDA kernels of Conv, ConvInputGrad and ConvWeightGrad.
//
// cuDNN (ops/conv_cudnn.cuh) takes what it has engines for: float32 and 16-bit floats, up to three
// spatial dims. All else runs on the plain kernels here, and a note says so: one thread per element
// written, which gathers its terms in a fixed order.
#include <memory>

#include "ops/conv_cudnn.cuh"
#include "ops/convolution.h"
#include "ops/elementwise.cuh"
#include "ops/launch.cuh"

namespace trainrt {

namespace {

constexpr int kMaxSpatial = 4;

struct ConvDims {
  int ndim;
  int64_t n, c, m, c_per_group, m_per_group, taps, in_size, out_size;
  int64_t in[kMaxSpatial], out[kMaxSpatial];
  int64_t kernel[kMaxSpatial], strides[kMaxSpatial], dilations[kMaxSpatial], pads[kMaxSpatial];
  int64_t x_n, x_c, x_step, y_n, y_c, y_step;  // strides of images; x_step: per position

  // The position in x that tap t of output position p reads; -1 outside.
  TRAINRT_HOST_DEVICE int64_t input_position(int64_t p, int64_t t) const {
    int64_t at = 0, stride = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      const int64_t i = p % out[d] * strides[d] - pads[d] + t % kernel[d] * dilations[d];
      p /= out[d];
      t /= kernel[d];
      if (i < 0 || i >= in[d]) {
        return -1;
      }
      at += i * stride;
      stride *= in[d];
    }
    return at;
  }
  // The output position whose tap t reads input position q; -1: none.
  TRAINRT_HOST_DEVICE int64_t output_position(int64_t q, int64_t t) const {
    int64_t at = 0, stride = 1;
    for (int d = ndim - 1; d >= 0; --d) {
      const int64_t start = q % in[d] + pads[d] - t % kernel[d] * dilations[d];
      q /= in[d];
      t /= kernel[d];
      if (start < 0 || start % strides[d] != 0 || start / strides[d] >= out[d]) {
        return -1;
      }
      at += start / strides[d] * stride;
      stride *= out[d];
    }
    return at;
  }
};

ConvDims dims_of(const KernelContext& context) {
  const Convolution conv = convolution_of(context);
  const Window& w = conv.window;
  TRAINRT_REQUIRE(
      w.ndim() <= kMaxSpatial, kUnsupported, context.node().name, ": ", w.ndim(), " spatial dims");
  ConvDims d{};
  d.ndim = w.ndim();
  d.n = conv.n;
  d.c = conv.c;
  d.m = conv.m;
  d.c_per_group = conv.c / conv.group;
  d.m_per_group = conv.m / conv.group;
  d.taps = conv.taps();
  d.in_size = num_elements(conv.input);
  d.out_size = num_elements(conv.output);
  for (int i = 0; i < d.ndim; ++i) {
    const size_t s = static_cast<size_t>(i);
    d.in[i] = conv.input[s];
    d.out[i] = conv.output[s];
    d.kernel[i] = w.kernel[s];
    d.strides[i] = w.strides[s];
    d.dilations[i] = w.dilations[s];
    d.pads[i] = w.pads_begin[s];
  }
  d.x_n = d.c * d.in_size;
  d.y_n = d.m * d.out_size;
  d.x_c = w.channels_last ? 1 : d.in_size;
  d.y_c = w.channels_last ? 1 : d.out_size;
  d.x_step = w.channels_last ? d.c : 1;
  d.y_step = w.channels_last ? d.m : 1;
  return d;
}

template <typename T>
struct ConvElement {
  ConvDims d;
  const T *x, *w, *bias;
  T* y;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    using C = ComputeOf<T>;
    const int64_t n = i / (d.m * d.out_size), m = i / d.out_size % d.m, p = i % d.out_size;
    const int64_t first = m / d.m_per_group * d.c_per_group;
    C sum = bias == nullptr ? C(0) : to_compute<C>(bias[m]);
    for (int64_t t = 0; t < d.taps; ++t) {
      const int64_t q = d.input_position(p, t);
      for (int64_t c = 0; q >= 0 && c < d.c_per_group; ++c) {
        sum += to_compute<C>(x[n * d.x_n + (first + c) * d.x_c + q * d.x_step]) *
               to_compute<C>(w[(m * d.c_per_group + c) * d.taps + t]);
      }
    }
    y[n * d.y_n + m * d.y_c + p * d.y_step] = to_storage<T>(sum);
  }
};

template <typename T>
struct ConvInputGradElement {
  ConvDims d;
  const T *dy, *w;
  T* dx;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    using C = ComputeOf<T>;
    const int64_t n = i / (d.c * d.in_size), c = i / d.in_size % d.c, q = i % d.in_size;
    const int64_t first = c / d.c_per_group * d.m_per_group, own = c % d.c_per_group;
    C sum = 0;
    for (int64_t t = 0; t < d.taps; ++t) {
      const int64_t p = d.output_position(q, t);
      for (int64_t m = first; p >= 0 && m < first + d.m_per_group; ++m) {
        sum += to_compute<C>(dy[n * d.y_n + m * d.y_c + p * d.y_step]) *
               to_compute<C>(w[(m * d.c_per_group + own) * d.taps + t]);
      }
    }
    dx[n * d.x_n + c * d.x_c + q * d.x_step] = to_storage<T>(sum);
  }
};

// A team per weight sums over images and positions.
template <typename T>
struct ConvWeightGradElement {
  ConvDims d;
  const T *x, *dy;
  T* dw;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t i) const {
    using C = ComputeOf<T>;
    const int64_t t = i % d.taps, own = i / d.taps % d.c_per_group,
                  m = i / (d.taps * d.c_per_group);
    const int64_t c = m / d.m_per_group * d.c_per_group + own;
    const ConvWeightGradElement& self = *this;
    const C sum = team_sum<C>(team, d.n * d.out_size, [&self, t, c, m](int64_t j) {
      const ConvDims& dims = self.d;
      const int64_t n = j / dims.out_size, p = j % dims.out_size;
      const int64_t q = dims.input_position(p, t);
      return q < 0 ? C(0)
                   : to_compute<C>(self.x[n * dims.x_n + c * dims.x_c + q * dims.x_step]) *
                         to_compute<C>(self.dy[n * dims.y_n + m * dims.y_c + p * dims.y_step]);
    });
    if (team.leads()) {
      dw[i] = to_storage<T>(sum);
    }
  }
};

void plain_conv(KernelContext& context) {
  const ConvDims d = dims_of(context);
  const std::string& type = context.node().op_type;
  dispatch_stored(context.node(), context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T *a = context.input<T>(0), *b = context.input<T>(1);
    T* out = context.output<T>(0);
    const int64_t n = num_elements(context.output_shape(0));
    if (type == "Conv") {
      launch(context, n, ConvElement<T>{d, a, b, context.input<T>(2), out});
    } else if (type == "ConvInputGrad") {
      launch(context, n, ConvInputGradElement<T>{d, a, b, out});
    } else {
      launch_teams(context, n, d.n * d.out_size, ConvWeightGradElement<T>{d, a, b, out});
    }
  });
}

template <typename T>
struct AddBias {
  const T* bias;
  T* y;
  int64_t m, step;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    using C = ComputeOf<T>;
    y[i] = to_storage<T>(to_compute<C>(y[i]) + to_compute<C>(bias[i / step % m]));
  }
};

void add_bias(KernelContext& context) {
  const ConvDims d = dims_of(context);
  dispatch_stored(context.node(), context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           AddBias<T>{context.input<T>(2), context.output<T>(0), d.m, d.y_c});
  });
}

Kernel conv_cuda(const OpContext& op, const DeviceSpec&) {
  if (op.num_elements(0) == 0 || op.num_elements(1) == 0 || num_elements(op.output_shape(0)) == 0) {
    return plain_conv;
  }
  if (const char* const why_not = cudnn::why_not_asked(op)) {
    return [why_not](KernelContext& context) {
      cuda_context(context).note(concat(
          context.node().op_type, ": cuDNN does not take ", why_not, "; a slow kernel runs"));
      plain_conv(context);
    };
  }
  auto convolution = std::make_shared<cudnn::ConvolutionPlan>(op);
  const bool has_bias = op.node().op_type == "Conv" && op.has_input(2);
  return [convolution, has_bias](KernelContext& context) {
    if (!convolution->run(context)) {
      plain_conv(context);
    } else if (has_bias) {
      add_bias(context);
    }
  };
}

const RegisterKernel kConv{"Conv", Backend::kCuda, conv_cuda};
const RegisterKernel kConvInputGrad{"ConvInputGrad", Backend::kCuda, conv_cuda};
const RegisterKernel kConvWeightGrad{"ConvWeightGrad", Backend::kCuda, conv_cuda};

}  // namespace

}  // namespace trainrt
