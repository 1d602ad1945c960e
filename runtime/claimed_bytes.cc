#include "runtime/claimed_bytes.h"

#include <limits>

namespace trainrt {

int64_t claimed_bytes(const Shape& shape, DType dtype) {
  int64_t bytes = dtype_bytes(dtype);
  for (const int64_t dim : shape) {
    if (__builtin_mul_overflow(bytes, dim, &bytes)) {
      return std::numeric_limits<int64_t>::max();
    }
  }
  return bytes;
}

}  // namespace trainrt
