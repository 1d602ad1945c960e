// By columns: for one image and group, columns [c * taps, positions] holds what each tap reads at
// each output position (0 in the padding). With w [m, c * taps] and y [m, positions]
//
//   Conv            y = w . columns
//   ConvInputGrad   columns = w^T . dy, added back to where they came from
//   ConvWeightGrad  dw = sum over images of dy . columns^T
//
// The workspace is the columns of one image and group. Images follow each other, so sums have one
// order whatever the number of threads.
#include "ops/conv_f64.h"

#include <algorithm>

#include "ops/convolution.h"
#include "ops/matmul_f64.h"

namespace trainrt {

namespace {

class ColumnConvolution {
 public:
  explicit ColumnConvolution(KernelContext& op)
      : op_(op),
        conv_(convolution_of(op)),
        x_(strides_of(conv_.x_shape(), conv_.window.channels_last)),
        y_(strides_of(conv_.y_shape(), conv_.window.channels_last)),
        c_(conv_.c / conv_.group),
        m_(conv_.m / conv_.group),
        positions_(num_elements(conv_.output)),
        rows_(c_ * conv_.taps()),
        columns_(reinterpret_cast<double*>(op.workspace().data())) {}

  void run() {
    const std::string& type = op_.node().op_type;
    for (int64_t n = 0; n < conv_.n; ++n) {
      for (int64_t g = 0; g < conv_.group; ++g) {
        if (type == "Conv") {
          forward(n, g);
        } else if (type == "ConvInputGrad") {
          input_grad(n, g);
        } else {
          weight_grad(n, g);
        }
      }
    }
  }

 private:
  int64_t x_offset(int64_t n, int64_t g) const { return n * x_.n + g * c_ * x_.c; }
  int64_t y_offset(int64_t n, int64_t g) const { return n * y_.n + g * m_ * y_.c; }
  int64_t w_offset(int64_t g) const { return g * m_ * rows_; }
  // Positions are the rows of a channel in either layout: the strides of a dense spatial block.
  int64_t position_stride() const { return y_.spatial.back(); }

  // Calls fn(row, position of x or -1) along the output for one row of columns; `x` is relative to
  // the channel's first element.
  template <typename Fn>
  void for_each_position(int64_t tap, Fn&& fn) const {
    const int ndim = conv_.window.ndim();
    for (int64_t p = 0; p < positions_; ++p) {
      int64_t offset = 0, p_rest = p, tap_rest = tap;
      bool inside = true;
      for (int d = ndim; d-- > 0;) {
        const size_t i = static_cast<size_t>(d);
        const int64_t in = p_rest % conv_.output[i] * conv_.window.strides[i] -
                           conv_.window.pads_begin[i] +
                           tap_rest % conv_.window.kernel[i] * conv_.window.dilations[i];
        p_rest /= conv_.output[i];
        tap_rest /= conv_.window.kernel[i];
        inside = inside && in >= 0 && in < conv_.input[i];
        offset += in * x_.spatial[i];
      }
      fn(p, inside ? offset : -1);
    }
  }

  void gather_columns(const double* x) {
    op_.parallel_for(rows_, grain(), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const double* channel = x + row / conv_.taps() * x_.c;
        double* to = columns_ + row * positions_;
        for_each_position(row % conv_.taps(),
                          [&](int64_t p, int64_t at) { to[p] = at >= 0 ? channel[at] : 0.0; });
      }
    });
  }

  // Channels are written by one task each.
  void scatter_columns(double* dx) {
    op_.parallel_for(c_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        double* channel = dx + c * x_.c;
        for (int64_t tap = 0; tap < conv_.taps(); ++tap) {
          const double* from = columns_ + (c * conv_.taps() + tap) * positions_;
          for_each_position(tap, [&](int64_t p, int64_t at) {
            if (at >= 0) {
              channel[at] += from[p];
            }
          });
        }
      }
    });
  }

  void forward(int64_t n, int64_t g) {
    gather_columns(op_.input<double>(0) + x_offset(n, g));
    const double* w = op_.input<double>(1) + w_offset(g);
    double* y = op_.output<double>(0) + y_offset(n, g);
    if (conv_.window.channels_last) {  // y^T = columns^T . w^T
      matmul_f64(op_,
                 {columns_, 1, positions_},
                 {w, 1, rows_},
                 {y, position_stride()},
                 positions_,
                 m_,
                 rows_);
    } else {
      matmul_f64(op_, {w, rows_, 1}, {columns_, positions_, 1}, {y, y_.c}, m_, positions_, rows_);
    }
    if (const double* bias = op_.input<double>(2)) {
      for (int64_t m = 0; m < m_; ++m) {
        for (int64_t p = 0; p < positions_; ++p) {
          y[m * y_.c + p * position_stride()] += bias[g * m_ + m];
        }
      }
    }
  }

  void input_grad(int64_t n, int64_t g) {
    const double* dy = op_.input<double>(0) + y_offset(n, g);
    const double* w = op_.input<double>(1) + w_offset(g);
    double* dx = op_.output<double>(0);
    if (g == 0) {
      std::fill(dx + n * x_.n, dx + (n + 1) * x_.n, 0.0);
    }
    matmul_f64(op_,
               {w, 1, rows_},
               {dy, y_.c, position_stride()},
               {columns_, positions_},
               rows_,
               positions_,
               m_);
    scatter_columns(dx + x_offset(n, g));
  }

  void weight_grad(int64_t n, int64_t g) {
    gather_columns(op_.input<double>(0) + x_offset(n, g));
    const double* dy = op_.input<double>(1) + y_offset(n, g);
    matmul_f64(op_,
               {dy, y_.c, position_stride()},
               {columns_, 1, positions_},
               {op_.output<double>(0) + w_offset(g), rows_, /*add=*/n > 0},
               m_,
               rows_,
               positions_);
  }

  int64_t grain() const {
    return std::max<int64_t>(1, (int64_t{1} << 14) / std::max<int64_t>(1, positions_));
  }

  KernelContext& op_;
  const Convolution conv_;
  const ImageStrides x_, y_;
  const int64_t c_, m_;  // channels of a group
  const int64_t positions_;
  const int64_t rows_;  // of the columns
  double* const columns_;
};

}  // namespace

int64_t conv_f64_workspace(const OpContext& op) {
  const Convolution conv = convolution_of(op);
  return conv.c / conv.group * conv.taps() * num_elements(conv.output) *
         static_cast<int64_t>(sizeof(double));
}

void conv_f64(KernelContext& op) {
  // Without an image nothing below would write the weight's gradient.
  double* out = op.output<double>(0);
  if (convolution_of(op).n == 0) {
    std::fill(out, out + num_elements(op.output_shape(0)), 0.0);
  }
  ColumnConvolution(op).run();
}

}  // namespace trainrt
