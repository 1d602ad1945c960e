// The element types of attributes such as Cast's `to`: numbers of ONNX's TensorProto.DataType.
#pragma once

#include <cstdint>

#include "graph/dtype.h"

namespace trainrt {

inline DType dtype_from_onnx(int64_t number) {
  switch (number) {
    case 1:
      return DType::kFloat32;
    case 2:
      return DType::kUInt8;
    case 3:
      return DType::kInt8;
    case 4:
      return DType::kUInt16;
    case 5:
      return DType::kInt16;
    case 6:
      return DType::kInt32;
    case 7:
      return DType::kInt64;
    case 9:
      return DType::kBool;
    case 10:
      return DType::kFloat16;
    case 11:
      return DType::kFloat64;
    case 12:
      return DType::kUInt32;
    case 13:
      return DType::kUInt64;
    case 16:
      return DType::kBFloat16;
    default:
      TRAINRT_FAIL(kUnsupported,
                   "ONNX element type number ",
                   number,
                   " (strings, complex numbers and types of 8 or fewer bits) is not supported");
  }
}

// A dtype attribute of our form ("float32").
inline DType dtype_attribute(const std::string& name) {
  const std::optional<DType> dtype = dtype_from_name(name);
  TRAINRT_REQUIRE(dtype.has_value(), kInvalidModel, "unknown element type '", name, "'");
  return *dtype;
}

}  // namespace trainrt
