// What functors use of the standard library and of our headers for hosts, for NVRTC, which has no
// headers of its own. Compiled by NVRTC alone: on top of a fused kernel's text, in place of all
// that (ops/fused_elementwise.cu).
#pragma once

using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

namespace std {

template <typename T>
struct numeric_limits;
template <>
struct numeric_limits<float> {
  static constexpr float min() { return 1.17549435e-38f; }
  static float infinity() { return __int_as_float(0x7f800000); }
  static float quiet_NaN() { return __int_as_float(0x7fc00000); }
};
template <>
struct numeric_limits<double> {
  static constexpr double min() { return 2.2250738585072014e-308; }
  static double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
  static double quiet_NaN() { return __longlong_as_double(0x7ff8000000000000ll); }
};

// Functors meet float and double here, no integers.
template <typename T>
inline constexpr bool is_integral_v = false;
template <typename T>
inline constexpr bool is_signed_v = true;
template <typename T>
inline constexpr bool is_unsigned_v = false;
template <typename T>
struct make_unsigned {
  using type = uint64_t;
};
template <typename T>
using make_unsigned_t = typename make_unsigned<T>::type;

using ::memcpy;

#define TRAINRT_MATH(name)       \
  inline float name(float x) {   \
    return ::name##f(x);         \
  }                              \
  inline double name(double x) { \
    return ::name(x);            \
  }
#define TRAINRT_MATH_OF_TWO(name)          \
  inline float name(float x, float y) {    \
    return ::name##f(x, y);                \
  }                                        \
  inline double name(double x, double y) { \
    return ::name(x, y);                   \
  }
TRAINRT_MATH(acos)
TRAINRT_MATH(acosh)
TRAINRT_MATH(asin)
TRAINRT_MATH(asinh)
TRAINRT_MATH(atan)
TRAINRT_MATH(atanh)
TRAINRT_MATH(ceil)
TRAINRT_MATH(cos)
TRAINRT_MATH(cosh)
TRAINRT_MATH(erf)
TRAINRT_MATH(exp)
TRAINRT_MATH(expm1)
TRAINRT_MATH(fabs)
TRAINRT_MATH(floor)
TRAINRT_MATH(log)
TRAINRT_MATH(log1p)
TRAINRT_MATH(rint)
TRAINRT_MATH(sin)
TRAINRT_MATH(sinh)
TRAINRT_MATH(sqrt)
TRAINRT_MATH(tan)
TRAINRT_MATH(tanh)
TRAINRT_MATH(trunc)
TRAINRT_MATH_OF_TWO(copysign)
TRAINRT_MATH_OF_TWO(fmod)
TRAINRT_MATH_OF_TWO(pow)
#undef TRAINRT_MATH
#undef TRAINRT_MATH_OF_TWO
inline float ldexp(float x, int e) {
  return ::ldexpf(x, e);
}
inline double ldexp(double x, int e) {
  return ::ldexp(x, e);
}

namespace numbers {
inline constexpr double inv_sqrtpi = 0.564189583547756286948;
}  // namespace numbers

}  // namespace std

namespace trainrt {

// Functors are made of attributes on the host; here their bytes are given.
struct Attributes {
  bool has(const char* name) const;
  double get_float(const char* name) const;
  double get_float(const char* name, double fallback) const;
  int64_t get_int(const char* name) const;
  int64_t get_int(const char* name, int64_t fallback) const;
};

}  // namespace trainrt
