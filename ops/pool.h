// The kernels of ops/pool.cc, which describes them.
#pragma once

#include "ops/spatial.h"

namespace trainrt::pool {

// The geometry of a pool. Its kernels see three spatial dims; missing ones are of size one.
struct Pool {
  Window window;
  ImageShape in;
  Shape out;  // spatial
  bool count_include_pad = false;
};

template <typename Context>
Pool pool_of(const Context& op) {
  Pool pool;
  pool.window = window_of(op.attributes());
  const std::string& type = op.node().op_type;
  const bool backward = type == "AveragePoolGrad" || type == "MaxPoolGrad";
  pool.in = image_shape(op.input_shape(0), pool.window.channels_last);
  if (backward) {
    pool.out = pool.in.spatial;
    pool.in.spatial = op.attributes().get_ints("input_spatial");
  } else {
    pool.out =
        window_output(pool.window, pool.in.spatial, op.attributes().get_int("ceil_mode", 0) != 0);
  }
  pool.count_include_pad = op.attributes().get_int("count_include_pad", 0) != 0;
  return pool;
}

// Which element of its window was the largest, counted in row-major order.
inline DType tap_dtype(const Window& window) {
  return num_elements(window.kernel) <= 256 ? DType::kUInt8 : DType::kInt32;
}

// By the operator's name; `fast` computes in the tensors' own precision, else in double.
Kernel kernel_of(const std::string& op_type, bool fast);

}  // namespace trainrt::pool
