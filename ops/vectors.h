// Whole vector registers as values, for the few loops that the compiler does not turn into good
// code by itself: sums and maxima along a row, tiles of a product.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace trainrt {

template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(64)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(64)));
};
template <typename T>
using Vector = typename VectorOf<T>::type;

template <typename T>
constexpr int64_t kVector = static_cast<int64_t>(64 / sizeof(T));

template <typename T>
inline Vector<T> load_vector(const T* from) {
  Vector<T> vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

// fn(0), ..., fn(kCount - 1) with each index a constant, so that arrays become registers.
template <int kCount, typename Fn>
[[gnu::always_inline]] inline void unrolled(Fn&& fn) {
  [&]<int... kIndex>(std::integer_sequence<int, kIndex...>) __attribute__((always_inline)) {
    (fn(std::integral_constant<int, kIndex>()), ...);
  }
  (std::make_integer_sequence<int, kCount>());
}

namespace internal {

// Lane i of the result is lane i + kShift, around the end.
template <typename T, int kShift, int... kLane>
inline Vector<T> rotated(Vector<T> v, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(v, v, ((kLane + kShift) % static_cast<int>(kVector<T>))...);
}

}  // namespace internal

// Joins all lanes, halves first.
template <typename T, int kShift = kVector<T> / 2, typename Join>
inline T fold_lanes(Vector<T> v, Join&& join) {
  v = join(v, internal::rotated<T, kShift>(v, std::make_integer_sequence<int, kVector<T>>()));
  if constexpr (kShift > 1) {
    return fold_lanes<T, kShift / 2>(v, join);
  } else {
    return v[0];
  }
}

template <typename T>
inline T sum_of_lanes(Vector<T> v) {
  return fold_lanes<T>(v, [](Vector<T> a, Vector<T> b) { return a + b; });
}

template <typename T>
inline T largest_lane(Vector<T> v) {
  return fold_lanes<T>(v, [](Vector<T> a, Vector<T> b) { return a > b ? a : b; });
}

// Over n elements, a whole number of vectors: their sum, the largest, the sum of products.
template <typename T>
inline T vector_sum(const T* x, int64_t n) {
  Vector<T> sum = {};
  for (int64_t i = 0; i < n; i += kVector<T>) {
    sum += load_vector(x + i);
  }
  return sum_of_lanes<T>(sum);
}

template <typename T>
inline T vector_max(const T* x, int64_t n) {
  Vector<T> largest = load_vector(x);
  for (int64_t i = kVector<T>; i < n; i += kVector<T>) {
    const Vector<T> v = load_vector(x + i);
    largest = v > largest ? v : largest;
  }
  return largest_lane<T>(largest);
}

template <typename T>
inline T vector_dot(const T* x, const T* y, int64_t n) {
  Vector<T> sum = {};
  for (int64_t i = 0; i < n; i += kVector<T>) {
    sum += load_vector(x + i) * load_vector(y + i);
  }
  return sum_of_lanes<T>(sum);
}

}  // namespace trainrt
