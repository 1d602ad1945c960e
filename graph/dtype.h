// Element types. The names and numbers of ONNX's TensorProto.DataType are mapped in graph/onnx_*.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>

#include "graph/base/error.h"

namespace trainrt {

enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kUInt8,
  kUInt16,
  kUInt32,
  kUInt64,
  kBool,
};

int64_t dtype_bytes(DType dtype);
const char* dtype_name(DType dtype);  // "float32", "bfloat16", ...
std::optional<DType> dtype_from_name(std::string_view name);
bool is_floating(DType dtype);
bool is_integer(DType dtype);  // bool is neither

// IEEE binary16 and bfloat16 as storage: every computation goes through float. Conversions round
// to nearest, ties to even; NaN stays NaN.
float float16_bits_to_float(uint16_t bits);
uint16_t float_to_float16_bits(float value);

struct Float16 {
  uint16_t bits = 0;
  Float16() = default;
  explicit Float16(float value) : bits(float_to_float16_bits(value)) {}
  explicit operator float() const { return float16_bits_to_float(bits); }
};

struct BFloat16 {
  uint16_t bits = 0;
  BFloat16() = default;
  explicit BFloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof(word));
    if ((word & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((word >> 16) | 0x40u);  // keep NaN quiet, never round it to inf
    } else {
      bits = static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
    }
  }
  explicit operator float() const {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
  }
};

template <typename T>
struct DTypeOf;
#define TRAINRT_DTYPE(type, enumerator)               \
  template <>                                         \
  struct DTypeOf<type> {                              \
    static constexpr DType value = DType::enumerator; \
  };
TRAINRT_DTYPE(float, kFloat32)
TRAINRT_DTYPE(double, kFloat64)
TRAINRT_DTYPE(Float16, kFloat16)
TRAINRT_DTYPE(BFloat16, kBFloat16)
TRAINRT_DTYPE(int8_t, kInt8)
TRAINRT_DTYPE(int16_t, kInt16)
TRAINRT_DTYPE(int32_t, kInt32)
TRAINRT_DTYPE(int64_t, kInt64)
TRAINRT_DTYPE(uint8_t, kUInt8)
TRAINRT_DTYPE(uint16_t, kUInt16)
TRAINRT_DTYPE(uint32_t, kUInt32)
TRAINRT_DTYPE(uint64_t, kUInt64)
TRAINRT_DTYPE(bool, kBool)
#undef TRAINRT_DTYPE

template <typename T>
constexpr DType dtype_of = DTypeOf<T>::value;

// Calls fn(T{}) with the C++ type of `dtype`: the one place where a run-time dtype becomes a type.
template <typename Fn>
decltype(auto) dispatch_floating(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(float{});
    case DType::kFloat64:
      return fn(double{});
    default:
      TRAINRT_FAIL(kUnsupported, "kernel wants float32 or float64, got ", dtype_name(dtype));
  }
}

template <typename Fn>
decltype(auto) dispatch_all(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(float{});
    case DType::kFloat64:
      return fn(double{});
    case DType::kFloat16:
      return fn(Float16{});
    case DType::kBFloat16:
      return fn(BFloat16{});
    case DType::kInt8:
      return fn(int8_t{});
    case DType::kInt16:
      return fn(int16_t{});
    case DType::kInt32:
      return fn(int32_t{});
    case DType::kInt64:
      return fn(int64_t{});
    case DType::kUInt8:
      return fn(uint8_t{});
    case DType::kUInt16:
      return fn(uint16_t{});
    case DType::kUInt32:
      return fn(uint32_t{});
    case DType::kUInt64:
      return fn(uint64_t{});
    case DType::kBool:
      return fn(bool{});
  }
  TRAINRT_FAIL(kInternal, "bad dtype");
}

// As dispatch_all, without float16, bfloat16 and bool: types with C++ arithmetic of their own.
template <typename Fn>
decltype(auto) dispatch_numeric(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kBool:
      TRAINRT_FAIL(kUnsupported, "kernel wants a numeric dtype, got ", dtype_name(dtype));
    default:
      return dispatch_all(dtype, [&](auto tag) -> decltype(fn(float{})) {
        if constexpr (std::is_arithmetic_v<decltype(tag)> && !std::is_same_v<decltype(tag), bool>) {
          return fn(tag);
        } else {
          TRAINRT_FAIL(kInternal, "unreachable");
        }
      });
  }
}

// The type a reduction over T accumulates in: double for both float types, so that the result
// depends on the order of summation only in the last bits of the narrower type.
template <typename T>
struct AccumulatorOf {
  using type = T;
};
template <>
struct AccumulatorOf<float> {
  using type = double;
};
template <>
struct AccumulatorOf<Float16> {
  using type = float;
};
template <>
struct AccumulatorOf<BFloat16> {
  using type = float;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

}  // namespace trainrt
