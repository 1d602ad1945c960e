// The operations of the double's cuDNN but for convolutions.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/cuda_double/cuda_dnn_graph.h"

namespace cuda_double::dnn {

namespace {

// Element of a tensor that is broadcast to `dims`, for the element `i` of `dims`.
int64_t broadcast_index(const std::vector<int64_t>& dims,
                        const std::vector<int64_t>& own,
                        int64_t i) {
  int64_t index = 0, stride = 1;
  for (size_t d = dims.size(); d-- > 0;) {
    index += own[d] == 1 ? 0 : i % dims[d] * stride;
    stride *= own[d];
    i /= dims[d];
  }
  return index;
}

bool broadcasts(const Tensor& from, const Tensor& to) {
  if (from.dims.size() != to.dims.size()) {
    return false;
  }
  for (size_t d = 0; d < to.dims.size(); ++d) {
    if (from.dims[d] != to.dims[d] && from.dims[d] != 1) {
      return false;
    }
  }
  return true;
}

struct Pointwise {
  const char* name;
  size_t inputs;
  double (*apply)(const double* x);
};

std::optional<Pointwise> pointwise_of(cudnnPointwiseMode_t mode) {
  switch (mode) {
    case CUDNN_POINTWISE_ADD:
      return Pointwise{"add", 2, [](const double* x) { return x[0] + x[1]; }};
    case CUDNN_POINTWISE_SUB:
      return Pointwise{"sub", 2, [](const double* x) { return x[0] - x[1]; }};
    case CUDNN_POINTWISE_MUL:
      return Pointwise{"mul", 2, [](const double* x) { return x[0] * x[1]; }};
    case CUDNN_POINTWISE_DIV:
      return Pointwise{"div", 2, [](const double* x) { return x[0] / x[1]; }};
    case CUDNN_POINTWISE_EXP:
      return Pointwise{"exp", 1, [](const double* x) { return std::exp(x[0]); }};
    case CUDNN_POINTWISE_LOG:
      return Pointwise{"log", 1, [](const double* x) { return std::log(x[0]); }};
    case CUDNN_POINTWISE_IDENTITY:
      return Pointwise{"identity", 1, [](const double* x) { return x[0]; }};
    case CUDNN_POINTWISE_CMP_GE:
      return Pointwise{"cmp_ge", 2, [](const double* x) { return x[0] >= x[1] ? 1.0 : 0.0; }};
    case CUDNN_POINTWISE_BINARY_SELECT:
      return Pointwise{"select", 3, [](const double* x) { return x[2] != 0 ? x[0] : x[1]; }};
    default:
      return std::nullopt;
  }
}

std::optional<Operation> index_of(const Node& maths, const Tensor& x, const Tensor& y) {
  const int64_t axis = maths.one<int64_t>(CUDNN_ATTR_POINTWISE_AXIS, -1);
  if (axis < 0 || axis >= static_cast<int64_t>(y.dims.size()) || x.dims != y.dims ||
      y.type != CUDNN_DATA_INT32) {
    return std::nullopt;
  }
  return Operation{"gen_index", {x}, y, [y, axis](const auto&) {
                     Values values(static_cast<size_t>(y.num_elements()));
                     int64_t inner = 1;
                     for (size_t d = static_cast<size_t>(axis) + 1; d < y.dims.size(); ++d) {
                       inner *= y.dims[d];
                     }
                     for (size_t i = 0; i < values.size(); ++i) {
                       values[i] = static_cast<double>(static_cast<int64_t>(i) / inner %
                                                       y.dims[static_cast<size_t>(axis)]);
                     }
                     return values;
                   }};
}

std::optional<Operation> pointwise_operation(const Node& node) {
  const Node *maths = node.child(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR),
             *out = node.child(CUDNN_ATTR_OPERATION_POINTWISE_YDESC);
  if (maths == nullptr || out == nullptr ||
      maths->one<cudnnDataType_t>(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_DATA_HALF) !=
          CUDNN_DATA_FLOAT) {
    return std::nullopt;
  }
  const Tensor y = tensor_of(*out);
  std::vector<Tensor> inputs;
  for (const int name : {static_cast<int>(CUDNN_ATTR_OPERATION_POINTWISE_XDESC),
                         static_cast<int>(CUDNN_ATTR_OPERATION_POINTWISE_BDESC),
                         static_cast<int>(CUDNN_ATTR_OPERATION_POINTWISE_TDESC)}) {
    if (const Node* child = node.child(name)) {
      inputs.push_back(tensor_of(*child));
      if (!broadcasts(inputs.back(), y)) {
        return std::nullopt;
      }
    }
  }
  const auto mode =
      maths->one<cudnnPointwiseMode_t>(CUDNN_ATTR_POINTWISE_MODE, CUDNN_POINTWISE_LOGICAL_NOT);
  if (mode == CUDNN_POINTWISE_GEN_INDEX && inputs.size() == 1) {
    return index_of(*maths, inputs[0], y);
  }
  const std::optional<Pointwise> pointwise = pointwise_of(mode);
  const bool gives_flags = mode == CUDNN_POINTWISE_CMP_GE;
  if (!pointwise || pointwise->inputs != inputs.size() ||
      (y.type == CUDNN_DATA_BOOLEAN) != gives_flags ||
      (mode == CUDNN_POINTWISE_BINARY_SELECT && inputs[2].type != CUDNN_DATA_BOOLEAN)) {
    return std::nullopt;
  }
  return Operation{
      pointwise->name, inputs, y, [inputs, y, apply = pointwise->apply](const auto& given) {
        Values values(static_cast<size_t>(y.num_elements()));
        for (size_t i = 0; i < values.size(); ++i) {
          double x[3] = {};
          for (size_t k = 0; k < inputs.size(); ++k) {
            x[k] = (*given[k])[static_cast<size_t>(
                broadcast_index(y.dims, inputs[k].dims, static_cast<int64_t>(i)))];
          }
          values[i] = apply(x);
        }
        return values;
      }};
}

// Leading dims of b may be a divisor of a's: heads that share keys.
std::optional<Operation> matmul_operation(const Node& node) {
  const Node *maths = node.child(CUDNN_ATTR_OPERATION_MATMUL_DESC),
             *na = node.child(CUDNN_ATTR_OPERATION_MATMUL_ADESC),
             *nb = node.child(CUDNN_ATTR_OPERATION_MATMUL_BDESC),
             *nc = node.child(CUDNN_ATTR_OPERATION_MATMUL_CDESC);
  if (maths == nullptr || na == nullptr || nb == nullptr || nc == nullptr ||
      maths->one<cudnnDataType_t>(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_DATA_HALF) !=
          CUDNN_DATA_FLOAT) {
    return std::nullopt;
  }
  const Tensor a = tensor_of(*na), b = tensor_of(*nb), c = tensor_of(*nc);
  if (a.dims.size() != 4 || b.dims.size() != 4 || c.dims.size() != 4 || a.dims[0] != b.dims[0] ||
      a.dims[1] % b.dims[1] != 0 || a.dims[3] != b.dims[2] ||
      c.dims != std::vector<int64_t>{a.dims[0], a.dims[1], a.dims[2], b.dims[3]}) {
    return std::nullopt;
  }
  return Operation{"matmul", {a, b}, c, [a, b, c](const auto& given) {
                     const int64_t m = c.dims[2], n = c.dims[3], k = a.dims[3];
                     const int64_t group = a.dims[1] / b.dims[1];
                     Values values(static_cast<size_t>(c.num_elements()));
                     for (int64_t i = 0; i < c.num_elements(); ++i) {
                       const int64_t column = i % n, row = i / n % m, head = i / (n * m);
                       double sum = 0;
                       for (int64_t j = 0; j < k; ++j) {
                         sum +=
                             (*given[0])[static_cast<size_t>((head * m + row) * k + j)] *
                             (*given[1])[static_cast<size_t>((head / group * k + j) * n + column)];
                       }
                       values[static_cast<size_t>(i)] = sum;
                     }
                     return values;
                   }};
}

// Dims of y divide those of x: 1, or, over heads, the number of those that share keys.
std::optional<Operation> reduction_operation(const Node& node) {
  const Node *maths = node.child(CUDNN_ATTR_OPERATION_REDUCTION_DESC),
             *nx = node.child(CUDNN_ATTR_OPERATION_REDUCTION_XDESC),
             *ny = node.child(CUDNN_ATTR_OPERATION_REDUCTION_YDESC);
  if (maths == nullptr || nx == nullptr || ny == nullptr ||
      maths->one<cudnnDataType_t>(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_DATA_HALF) !=
          CUDNN_DATA_FLOAT) {
    return std::nullopt;
  }
  const Tensor x = tensor_of(*nx), y = tensor_of(*ny);
  const auto op =
      maths->one<cudnnReduceTensorOp_t>(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_REDUCE_TENSOR_MUL);
  const bool max = op == CUDNN_REDUCE_TENSOR_MAX;
  bool fits = x.dims.size() == y.dims.size() && (max || op == CUDNN_REDUCE_TENSOR_ADD);
  for (size_t d = 0; fits && d < x.dims.size(); ++d) {
    fits = x.dims[d] % y.dims[d] == 0;
  }
  if (!fits) {
    return std::nullopt;
  }
  return Operation{max ? "max" : "sum", {x}, y, [x, y, max](const auto& given) {
                     Values values(static_cast<size_t>(y.num_elements()),
                                   max ? -std::numeric_limits<double>::infinity() : 0.0);
                     for (int64_t i = 0; i < x.num_elements(); ++i) {
                       int64_t rest = i, at = 0, stride = 1;
                       for (size_t d = x.dims.size(); d-- > 0;) {
                         at += rest % x.dims[d] / (x.dims[d] / y.dims[d]) * stride;
                         stride *= y.dims[d];
                         rest /= x.dims[d];
                       }
                       double& value = values[static_cast<size_t>(at)];
                       const double own = (*given[0])[static_cast<size_t>(i)];
                       value = max ? std::max(value, own) : value + own;
                     }
                     return values;
                   }};
}

// Only the exchange of the last two dims, which the strides of y say.
std::optional<Operation> reshape_operation(const Node& node) {
  const Node *nx = node.child(CUDNN_ATTR_OPERATION_RESHAPE_XDESC),
             *ny = node.child(CUDNN_ATTR_OPERATION_RESHAPE_YDESC);
  if (nx == nullptr || ny == nullptr) {
    return std::nullopt;
  }
  const Tensor x = tensor_of(*nx), y = tensor_of(*ny);
  if (x.dims.size() != 4 ||
      y.dims != std::vector<int64_t>{x.dims[0], x.dims[1], x.dims[3], x.dims[2]} ||
      y.strides != std::vector<int64_t>{x.strides[0], x.strides[1], x.strides[3], x.strides[2]}) {
    return std::nullopt;
  }
  return Operation{
      "reshape", {x}, y, [x](const auto& given) {
        const int64_t rows = x.dims[2], columns = x.dims[3];
        Values values(given[0]->size());
        for (int64_t i = 0; i < x.num_elements(); ++i) {
          const int64_t column = i % columns, row = i / columns % rows;
          values[static_cast<size_t>(i / (rows * columns) * rows * columns + column * rows + row)] =
              (*given[0])[static_cast<size_t>(i)];
        }
        return values;
      }};
}

}  // namespace

std::optional<Operation> operation_of(const Node& node) {
  switch (node.type) {
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
      return pointwise_operation(node);
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
      return matmul_operation(node);
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
      return reduction_operation(node);
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
      return reshape_operation(node);
    default:
      return convolution_of(node);
  }
}

}  // namespace cuda_double::dnn
