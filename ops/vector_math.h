// exp, log, tanh, erf and relatives in forms that the compiler turns into vector code: no branch,
// no table, no call. The float versions are good to about 2e-7 relative; the double versions are
// the C library's, on which reference kernels run.
//
// exp: Cody-Waite reduction x = n ln2 + r, then e^r = 1 + r + r^2 p(r). log: x = 2^e m with m in
// [sqrt(1/2), sqrt(2)), then log1p. tanh and erf: an odd polynomial near 0, one exp elsewhere. The
// coefficients are minimax fits (Lawson's reweighted least squares on Chebyshev nodes).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "ops/host_device.h"

namespace trainrt::vmath {

namespace internal {

TRAINRT_HOST_DEVICE inline float from_bits(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

TRAINRT_HOST_DEVICE inline int32_t to_bits(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TRAINRT_HOST_DEVICE inline float power_of_two(int32_t exponent) {
  return from_bits((exponent + 127) << 23);
}

// (e^r - 1 - r) / r^2 for |r| <= ln2 / 2.
TRAINRT_HOST_DEVICE inline float exp_tail(float r) {
  float p = 1.395171916e-03f;
  p = p * r + 8.369598221e-03f;
  p = p * r + 4.166618726e-02f;
  p = p * r + 1.666651289e-01f;
  return p * r + 5.000000101e-01f;
}

}  // namespace internal

TRAINRT_HOST_DEVICE inline double exp(double x) {
  return std::exp(x);
}
TRAINRT_HOST_DEVICE inline float exp(float x) {
  // Clamped where the result is 0 or infinite anyway; comparisons are ordered so that NaN passes.
  const float clamped = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x);
  const float n = std::rint(clamped * 1.44269504f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  const float mantissa = 1.0f + (r + r * r * internal::exp_tail(r));
  // Two factors, so that neither leaves the normal range: denormal results stay right. NaN would
  // make the conversion undefined; any n does, since the mantissa is NaN then.
  const int32_t exponent = static_cast<int32_t>(n == n ? n : 0.0f);
  const int32_t half = exponent >> 1;
  return mantissa * internal::power_of_two(half) * internal::power_of_two(exponent - half);
}

// exp for arguments that are at most about 0 (softmax): less work, and 0 where the result would be
// denormal. NaN passes.
TRAINRT_HOST_DEVICE inline double exp_nonpositive(double x) {
  return std::exp(x);
}
TRAINRT_HOST_DEVICE inline float exp_nonpositive(float x) {
  const float clamped = x < -87.0f ? -87.0f : x;
  const float n = std::rint(clamped * 1.44269504f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  const float mantissa = 1.0f + (r + r * r * internal::exp_tail(r));
  const float scaled = mantissa * internal::power_of_two(static_cast<int32_t>(n == n ? n : 0.0f));
  return x < -87.0f ? 0.0f : scaled;
}

TRAINRT_HOST_DEVICE inline double expm1(double x) {
  return std::expm1(x);
}
TRAINRT_HOST_DEVICE inline float expm1(float x) {
  const float small = x + x * x * internal::exp_tail(x);
  return std::fabs(x) < 0.34f ? small : exp(x) - 1.0f;
}

TRAINRT_HOST_DEVICE inline double log(double x) {
  return std::log(x);
}
TRAINRT_HOST_DEVICE inline float log(float x) {
  const bool denormal = x < std::numeric_limits<float>::min();
  const float scaled = denormal ? x * 0x1p23f : x;
  const int32_t bits = internal::to_bits(scaled);
  // Subtracting the bits of sqrt(1/2) puts the mantissa into [sqrt(1/2), sqrt(2)).
  const int32_t e = (bits - 0x3f3504f3) >> 23;
  const float m = internal::from_bits(bits - e * (1 << 23)) - 1.0f;
  float p = 6.746638277e-02f;
  p = p * m - 1.167565123e-01f;
  p = p * m + 1.188816297e-01f;
  p = p * m - 1.240558906e-01f;
  p = p * m + 1.421955228e-01f;
  p = p * m - 1.666799584e-01f;
  p = p * m + 2.000211866e-01f;
  p = p * m - 2.500000960e-01f;
  p = p * m + 3.333331260e-01f;
  const float n = static_cast<float>(e) - (denormal ? 23.0f : 0.0f);
  const float result = n * 0.693359375f + (m + (m * m * (m * p - 0.5f) - n * 2.12194440e-4f));
  const float infinity = std::numeric_limits<float>::infinity();
  const float finite = x < infinity ? result : x;  // infinity and NaN
  const float domain = x < 0.0f ? std::numeric_limits<float>::quiet_NaN() : finite;
  return x == 0.0f ? -infinity : domain;
}

// log(1 + x) for x >= -1; the quotient repairs the rounding of 1 + x.
TRAINRT_HOST_DEVICE inline double log1p(double x) {
  return std::log1p(x);
}
TRAINRT_HOST_DEVICE inline float log1p(float x) {
  const float w = 1.0f + x;
  const float exact = w - 1.0f;
  const float infinity = std::numeric_limits<float>::infinity();
  const float quotient = exact == 0.0f ? x : log(w) * (x / (exact == 0.0f ? 1.0f : exact));
  return x == infinity ? x : quotient;
}

TRAINRT_HOST_DEVICE inline double tanh(double x) {
  return std::tanh(x);
}
TRAINRT_HOST_DEVICE inline float tanh(float x) {
  const float u = x * x;
  float p = -5.717044514e-03f;
  p = p * u + 2.065058679e-02f;
  p = p * u - 5.374349792e-02f;
  p = p * u + 1.333149128e-01f;
  p = p * u - 3.333328393e-01f;
  const float small = x + x * u * p;
  const float a = std::fabs(x);
  const float large = std::copysign(1.0f - 2.0f / (exp(2.0f * a) + 1.0f), x);
  return a < 0.625f ? small : large;
}

TRAINRT_HOST_DEVICE inline double erf(double x) {
  return std::erf(x);
}
TRAINRT_HOST_DEVICE inline float erf(float x) {
  const float u = x * x;
  float p = 7.889122751e-05f;
  p = p * u - 8.020842245e-04f;
  p = p * u + 5.189535448e-03f;
  p = p * u - 2.685444465e-02f;
  p = p * u + 1.128360018e-01f;
  p = p * u - 3.761262714e-01f;
  p = p * u + 1.128379166e+00f;
  const float a = std::fabs(x);
  const float t = a > 4.0f ? 4.0f : a;  // erf(4) rounds to 1
  float q = -2.169758933e-05f;          // log erfc(t)
  q = q * t + 4.414723258e-04f;
  q = q * t - 4.205282961e-03f;
  q = q * t + 2.521033440e-02f;
  q = q * t - 1.084220902e-01f;
  q = q * t - 6.332164064e-01f;
  q = q * t - 1.129580306e+00f;
  q = q * t + 1.884666030e-04f;
  const float large = std::copysign(1.0f - exp(q), x);
  return a < 1.0f ? x * p : large;
}

template <typename T>
TRAINRT_HOST_DEVICE T sigmoid(T x) {
  return T(1) / (T(1) + exp(-x));
}

// log(1 + e^x) without overflow.
template <typename T>
TRAINRT_HOST_DEVICE T softplus(T x) {
  const T positive = x > T(0) ? x : T(0);
  return positive + log1p(exp(-std::fabs(x)));
}

}  // namespace trainrt::vmath
