#include "graph/shape.h"

#include <algorithm>

#include "graph/base/error.h"

namespace trainrt {

namespace {

// More than the elements of any tensor that a machine holds, and few enough that the shape rules
// add and multiply a few dims within int64.
constexpr int64_t kMostElements = int64_t{1} << 48;

}  // namespace

int64_t num_elements(const Shape& shape) {
  int64_t others = 1;  // a dim of 0 does not excuse the others
  for (const int64_t dim : shape) {
    TRAINRT_REQUIRE(dim >= 0,
                    kInvalidModel,
                    "shape ",
                    shape_string(shape),
                    " has the dim ",
                    dim,
                    "; wanted 0 or more");
    const int64_t size = std::max<int64_t>(1, dim);
    TRAINRT_REQUIRE(size <= kMostElements / others,
                    kInvalidModel,
                    "shape ",
                    shape_string(shape),
                    " has more than 2^48 elements");
    others *= size;
  }
  return dims_product(shape, 0, static_cast<int>(shape.size()));
}

int64_t dims_product(const Shape& shape, int begin, int end) {
  int64_t product = 1;
  for (int i = begin; i < end; ++i) {
    TRAINRT_REQUIRE(!__builtin_mul_overflow(product, shape[i], &product),
                    kInvalidModel,
                    "shape ",
                    shape_string(shape),
                    " has more than 2^63 elements");
  }
  return product;
}

Shape row_major_strides(const Shape& shape) {
  Shape strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

Shape broadcast_shapes(const Shape& a, const Shape& b) {
  Shape out(std::max(a.size(), b.size()));
  for (size_t i = 0; i < out.size(); ++i) {
    // Right-aligned: i counts from the last dim.
    const int64_t da = i < a.size() ? a[a.size() - 1 - i] : 1;
    const int64_t db = i < b.size() ? b[b.size() - 1 - i] : 1;
    TRAINRT_REQUIRE(da == db || da == 1 || db == 1,
                    kInvalidModel,
                    "shapes ",
                    shape_string(a),
                    " and ",
                    shape_string(b),
                    " do not broadcast");
    out[out.size() - 1 - i] = da == 1 ? db : da;
  }
  return out;
}

Shape broadcast_strides(const Shape& shape, const Shape& target) {
  const Shape own = row_major_strides(shape);
  Shape strides(target.size(), 0);
  const size_t offset = target.size() - shape.size();
  for (size_t i = 0; i < shape.size(); ++i) {
    strides[offset + i] = shape[i] == 1 && target[offset + i] != 1 ? 0 : own[i];
  }
  return strides;
}

int normalize_axis(int64_t axis, int ndim) {
  TRAINRT_REQUIRE(axis >= -ndim && axis < ndim,
                  kInvalidModel,
                  "axis ",
                  axis,
                  " is outside a tensor of ",
                  ndim,
                  " dimensions");
  return static_cast<int>(axis < 0 ? axis + ndim : axis);
}

std::string shape_string(const Shape& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

}  // namespace trainrt
