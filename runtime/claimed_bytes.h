// What a data file's header claims.
#pragma once

#include <cstdint>

#include "graph/dtype.h"
#include "graph/shape.h"

namespace trainrt {

// The bytes of an array, or the largest int64 where they are more: a damaged header is told from
// the file's size.
int64_t claimed_bytes(const Shape& shape, DType dtype);

}  // namespace trainrt
