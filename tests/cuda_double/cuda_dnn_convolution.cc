// The convolutions of the double's cuDNN.
#include <algorithm>
#include <iterator>

#include "tests/cuda_double/cuda_dnn_graph.h"

namespace cuda_double::dnn {

namespace {

enum class Side { kForward, kData, kFilter };

// The names of what an operation refers to.
struct Names {
  int type;
  Side side;
  const char* name;
  int x, w, y, convolution, alpha, beta;
};

constexpr Names kNames[] = {{CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                             Side::kForward,
                             "conv_forward",
                             CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
                            {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                             Side::kData,
                             "conv_data",
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
                            {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                             Side::kFilter,
                             "conv_filter",
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                             CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA}};

struct Convolution {
  Side side{};
  Tensor x, w, y;
  std::vector<int64_t> strides, dilations, pads, pads_end;
};

bool is_float(cudnnDataType_t type) {
  return type == CUDNN_DATA_FLOAT || type == CUDNN_DATA_HALF || type == CUDNN_DATA_BFLOAT16;
}

bool fits(const Convolution& c, const Node& maths, const Node& operation, const Names& names) {
  const size_t spatial = c.x.dims.size() - 2;
  bool good =
      is_valid(c.x) && is_valid(c.w) && is_valid(c.y) && is_float(c.x.type) &&
      c.x.type == c.w.type && c.x.type == c.y.type && c.x.dims.size() >= 4 &&
      c.w.dims.size() == c.x.dims.size() && c.y.dims.size() == c.x.dims.size() &&
      c.strides.size() == spatial && c.dilations.size() == spatial && c.pads.size() == spatial &&
      c.pads_end.size() == spatial &&
      maths.one<int64_t>(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, 0) == static_cast<int64_t>(spatial) &&
      maths.one<cudnnDataType_t>(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_DATA_HALF) ==
          CUDNN_DATA_FLOAT &&
      maths.one<cudnnConvolutionMode_t>(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_CONVOLUTION) ==
          CUDNN_CROSS_CORRELATION &&
      operation.one<float>(names.alpha, 0) == 1 && operation.one<float>(names.beta, 1) == 0 &&
      c.x.dims[0] == c.y.dims[0] && c.y.dims[1] == c.w.dims[0] && c.x.dims[1] % c.w.dims[1] == 0 &&
      c.y.dims[1] % (c.x.dims[1] / c.w.dims[1]) == 0;
  for (size_t d = 0; good && d < spatial; ++d) {
    const int64_t reach = (c.w.dims[d + 2] - 1) * c.dilations[d] + 1;
    good =
        (c.x.dims[d + 2] + c.pads[d] + c.pads_end[d] - reach) / c.strides[d] + 1 == c.y.dims[d + 2];
  }
  return good;
}

// Calls fn(x element, w element, y element) for every multiplication.
template <typename Fn>
void for_each_term(const Convolution& c, const Fn& fn) {
  const size_t spatial = c.strides.size();
  int64_t x_size = 1, positions = 1, taps = 1;
  for (size_t d = 0; d < spatial; ++d) {
    x_size *= c.x.dims[d + 2];
    positions *= c.y.dims[d + 2];
    taps *= c.w.dims[d + 2];
  }
  const int64_t groups = c.x.dims[1] / c.w.dims[1], m_per_group = c.y.dims[1] / groups;
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t t = 0; t < taps; ++t) {
      int64_t x_at = 0, x_stride = 1, p_rest = p, t_rest = t;
      bool inside = true;
      for (size_t d = spatial; d-- > 0;) {
        const int64_t in = p_rest % c.y.dims[d + 2] * c.strides[d] - c.pads[d] +
                           t_rest % c.w.dims[d + 2] * c.dilations[d];
        p_rest /= c.y.dims[d + 2];
        t_rest /= c.w.dims[d + 2];
        inside = inside && in >= 0 && in < c.x.dims[d + 2];
        x_at += in * x_stride;
        x_stride *= c.x.dims[d + 2];
      }
      for (int64_t n = 0; inside && n < c.x.dims[0]; ++n) {
        for (int64_t m = 0; m < c.y.dims[1]; ++m) {
          for (int64_t k = 0; k < c.w.dims[1]; ++k) {
            const int64_t channel = m / m_per_group * c.w.dims[1] + k;
            fn(static_cast<size_t>((n * c.x.dims[1] + channel) * x_size + x_at),
               static_cast<size_t>((m * c.w.dims[1] + k) * taps + t),
               static_cast<size_t>((n * c.y.dims[1] + m) * positions + p));
          }
        }
      }
    }
  }
}

}  // namespace

std::optional<Operation> convolution_of(const Node& operation) {
  const auto* names =
      std::find_if(std::begin(kNames), std::end(kNames), [&](const Names& candidate) {
        return candidate.type == static_cast<int>(operation.type);
      });
  if (names == std::end(kNames)) {
    return std::nullopt;
  }
  const Node *tx = operation.child(names->x), *tw = operation.child(names->w),
             *ty = operation.child(names->y), *maths = operation.child(names->convolution);
  if (tx == nullptr || tw == nullptr || ty == nullptr || maths == nullptr) {
    return std::nullopt;
  }
  const Convolution c{names->side,
                      tensor_of(*tx),
                      tensor_of(*tw),
                      tensor_of(*ty),
                      maths->get<int64_t>(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES),
                      maths->get<int64_t>(CUDNN_ATTR_CONVOLUTION_DILATIONS),
                      maths->get<int64_t>(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS),
                      maths->get<int64_t>(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS)};
  if (!fits(c, *maths, operation, *names)) {
    return std::nullopt;
  }
  const Tensor& target = c.side == Side::kForward ? c.y : c.side == Side::kData ? c.x : c.w;
  const Tensor& first = c.side == Side::kData ? c.y : c.x;
  const Tensor& second = c.side == Side::kFilter ? c.y : c.w;
  const auto compute = [c, target](bool narrow) -> Operation::Compute {
    return [c, target, narrow](const auto& given) {
      const Values &a = *given[0], &b = *given[1];
      Values sums(static_cast<size_t>(target.num_elements()));
      for_each_term(c, [&](size_t x, size_t w, size_t y) {
        const bool data = c.side == Side::kData, filter = c.side == Side::kFilter;
        double& sum = sums[data ? x : filter ? w : y];
        sum += a[data ? y : x] * b[filter ? y : w];
        sum = narrow ? rounded(target, {sum})[0] : sum;
      });
      return sums;
    };
  };
  // As in the real library, the fastest engine for weights' gradients in float16 does so.
  const bool narrow = c.side == Side::kFilter && target.type == CUDNN_DATA_HALF;
  return Operation{
      names->name, {first, second}, target, compute(false), narrow ? compute(true) : nullptr};
}

}  // namespace cuda_double::dnn
