// The reference kernel of Conv, ConvInputGrad and ConvWeightGrad: visits (image, output channel,
// output position, tap).
#include "graph/op_def.h"
#include "ops/convolution.h"

namespace trainrt {

ImageStrides strides_of(const Shape& shape, bool channels_last) {
  const Shape strides = row_major_strides(shape);
  const ImageShape split = image_shape(strides, channels_last);
  return {split.n, split.c, split.spatial};
}

namespace {

// Calls fn(x offset, w offset, y offset) for every multiplication of the convolution: by image,
// output channel, output position, input channel, tap.
template <typename Fn>
void for_each_term(const Convolution& conv, Fn&& fn) {
  const ImageStrides xs = strides_of(conv.x_shape(), conv.window.channels_last);
  const ImageStrides ys = strides_of(conv.y_shape(), conv.window.channels_last);
  const int64_t c_per_group = conv.c / conv.group, m_per_group = conv.m / conv.group;
  const int64_t positions = num_elements(conv.output), taps = conv.taps();
  const int ndim = conv.window.ndim();
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t t = 0; t < taps; ++t) {
      int64_t x_offset = 0, y_offset = 0, p_rest = p, t_rest = t;
      bool inside = true;
      for (int d = ndim; d-- > 0;) {
        const int64_t out = p_rest % conv.output[d];
        const int64_t in = out * conv.window.strides[d] - conv.window.pads_begin[d] +
                           (t_rest % conv.window.kernel[d]) * conv.window.dilations[d];
        p_rest /= conv.output[d];
        t_rest /= conv.window.kernel[d];
        inside = inside && in >= 0 && in < conv.input[d];
        x_offset += in * xs.spatial[d];
        y_offset += out * ys.spatial[d];
      }
      if (!inside) {
        continue;
      }
      for (int64_t n = 0; n < conv.n; ++n) {
        for (int64_t m = 0; m < conv.m; ++m) {
          const int64_t first_c = m / m_per_group * c_per_group;
          for (int64_t c = 0; c < c_per_group; ++c) {
            fn(x_offset + n * xs.n + (first_c + c) * xs.c,
               (m * c_per_group + c) * taps + t,
               y_offset + n * ys.n + m * ys.c);
          }
        }
      }
    }
  }
}

// The reference sums in double whatever T, in a buffer of its own: it is no fast kernel.
template <typename T, typename Fn>
void accumulate_reference(KernelContext& op, Fn&& terms) {
  std::vector<double> sums(static_cast<size_t>(num_elements(op.output_shape(0))), 0.0);
  terms(sums);
  T* out = op.output<T>(0);
  for (size_t i = 0; i < sums.size(); ++i) {
    out[i] = static_cast<T>(sums[i]);
  }
}

template <typename T>
void conv_reference(KernelContext& op) {
  const Convolution conv = convolution_of(op);
  const T* first = op.input<T>(0);
  const T* second = op.input<T>(1);
  const std::string& type = op.node().op_type;
  accumulate_reference<T>(op, [&](std::vector<double>& sums) {
    for_each_term(conv, [&](int64_t x, int64_t w, int64_t y) {
      const int64_t out = type == "Conv" ? y : type == "ConvInputGrad" ? x : w;
      const int64_t a = type == "ConvInputGrad" ? y : x;
      const int64_t b = type == "ConvWeightGrad" ? y : w;
      sums[static_cast<size_t>(out)] +=
          static_cast<double>(first[a]) * static_cast<double>(second[b]);
    });
    if (const T* bias = op.input<T>(2)) {
      const ImageStrides ys = strides_of(conv.y_shape(), conv.window.channels_last);
      for (size_t i = 0; i < sums.size(); ++i) {
        sums[i] += static_cast<double>(bias[static_cast<int64_t>(i) / ys.c % conv.m]);
      }
    }
  });
}

}  // namespace

void convolution_reference(KernelContext& op) {
  dispatch_floating(op.output_dtype(0), [&](auto tag) { conv_reference<decltype(tag)>(op); });
}

}  // namespace trainrt
