#include "ops/convert.h"

#include <cstring>

#include "graph/convert_number.h"

#ifdef __F16C__
#include <immintrin.h>
#endif

namespace trainrt {

namespace {

template <typename From, typename To>
void convert_loop(const From* from, To* to, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    to[i] = convert_number<To>(from[i]);
  }
}

#ifdef __F16C__
// The portable bit fiddling of Float16 does not vectorise; the processor has instructions.
template <>
void convert_loop(const Float16* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i,
                     _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < n; ++i) {
    to[i] = static_cast<float>(from[i]);
  }
}

template <>
void convert_loop(const float* from, Float16* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < n; ++i) {
    to[i] = Float16(from[i]);
  }
}
#endif

}  // namespace

void convert_elements(DType from_dtype, const void* from, DType to_dtype, void* to, int64_t n) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(n * dtype_bytes(from_dtype)));
    return;
  }
  dispatch_all(from_dtype, [&](auto from_tag) {
    dispatch_all(to_dtype, [&](auto to_tag) {
      convert_loop(
          static_cast<const decltype(from_tag)*>(from), static_cast<decltype(to_tag)*>(to), n);
    });
  });
}

}  // namespace trainrt
