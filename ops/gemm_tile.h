// Small matrix products inside fused kernels: C (+)= A . B with B's and C's columns contiguous and
// A at any strides. A tile of kTileRows x 2 vectors is held in registers (Goto & van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication", 2008); there is no packing and no threading,
// operands are expected to lie in the caches. Large products belong to oneDNN.
#pragma once

#include "ops/vectors.h"

namespace trainrt {

constexpr int kTileRows = 8;

// A matrix read as a[i * row + k * column].
template <typename T>
struct StridedMatrix {
  const T* data;
  int64_t row, column;
};

// kRows x (kVectors * kVector) of C.
template <typename T, int kRows, int kVectors>
inline void gemm_tile(
    StridedMatrix<T> a, const T* b, int64_t ldb, T* c, int64_t ldc, int64_t k, bool accumulate) {
  constexpr int kAll = kRows * kVectors;
  Vector<T> sums[kAll];
  const auto at = [=](int i) { return c + i / kVectors * ldc + i % kVectors * kVector<T>; };
  if (accumulate) {
    unrolled<kAll>([&](auto i) { sums[i] = load_vector(at(i)); });
  } else {
    unrolled<kAll>([&](auto i) { sums[i] = Vector<T>{}; });
  }
  for (int64_t p = 0; p < k; ++p) {
    Vector<T> row[kVectors];
    unrolled<kVectors>([&](auto v) { row[v] = load_vector(b + p * ldb + v * kVector<T>); });
    unrolled<kAll>([&](auto i) {
      sums[i] += a.data[i / kVectors * a.row + p * a.column] * row[i % kVectors];
    });
  }
  unrolled<kAll>([&](auto i) { std::memcpy(at(i), &sums[i], sizeof(Vector<T>)); });
}

// All rows of one column panel of kVectors vectors.
template <typename T, int kVectors>
inline void gemm_panel(StridedMatrix<T> a,
                       const T* b,
                       int64_t ldb,
                       T* c,
                       int64_t ldc,
                       int64_t m,
                       int64_t k,
                       bool accumulate) {
  int64_t i = 0;
  const auto tile = [&](auto rows) {
    gemm_tile<T, decltype(rows)::value, kVectors>(
        {a.data + i * a.row, a.row, a.column}, b, ldb, c + i * ldc, ldc, k, accumulate);
    i += decltype(rows)::value;
  };
  while (i + kTileRows <= m) {
    tile(std::integral_constant<int, kTileRows>());
  }
  if (i + 4 <= m) {
    tile(std::integral_constant<int, 4>());
  }
  if (i + 2 <= m) {
    tile(std::integral_constant<int, 2>());
  }
  if (i < m) {
    tile(std::integral_constant<int, 1>());
  }
}

// C[m, n] (+)= A[m, k] . B[k, n].
template <typename T>
void gemm_small(StridedMatrix<T> a,
                const T* b,
                int64_t ldb,
                T* c,
                int64_t ldc,
                int64_t m,
                int64_t n,
                int64_t k,
                bool accumulate) {
  int64_t j = 0;
  for (; j + 2 * kVector<T> <= n; j += 2 * kVector<T>) {
    gemm_panel<T, 2>(a, b + j, ldb, c + j, ldc, m, k, accumulate);
  }
  for (; j + kVector<T> <= n; j += kVector<T>) {
    gemm_panel<T, 1>(a, b + j, ldb, c + j, ldc, m, k, accumulate);
  }
  for (; j < n; ++j) {
    for (int64_t i = 0; i < m; ++i) {
      T sum = accumulate ? c[i * ldc + j] : T(0);
      for (int64_t p = 0; p < k; ++p) {
        sum += a.data[i * a.row + p * a.column] * b[p * ldb + j];
      }
      c[i * ldc + j] = sum;
    }
  }
}

// Rewrites b[n, k] (rows contiguous, ldb apart) as panels of 2 * kVector columns of its transpose,
// each panel [k][2 * kVector], zeros beyond n. `packed` holds packed_size() elements.
template <typename T>
int64_t packed_size(int64_t n, int64_t k) {
  const int64_t width = 2 * kVector<T>;
  return (n + width - 1) / width * width * k;
}

// to[p][i] = from[i][p] for i, p < 8, in three rounds of shuffles: pairs, quadruples, halves.
inline void transpose_8x8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  typedef float Eight __attribute__((vector_size(32)));
  Eight in[8], pairs[8], quads[8];
  unrolled<8>([&](auto i) { std::memcpy(&in[i], from + i * from_stride, sizeof(Eight)); });
  unrolled<4>([&](auto i) {
    pairs[2 * i] = __builtin_shufflevector(in[2 * i], in[2 * i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[2 * i + 1] =
        __builtin_shufflevector(in[2 * i], in[2 * i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  });
  unrolled<4>([&](auto i) {
    constexpr int kFirst = i / 2 * 4 + i % 2;
    quads[i / 2 * 4 + i % 2 * 2] =
        __builtin_shufflevector(pairs[kFirst], pairs[kFirst + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    quads[i / 2 * 4 + i % 2 * 2 + 1] =
        __builtin_shufflevector(pairs[kFirst], pairs[kFirst + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  });
  unrolled<4>([&](auto i) {
    const Eight low = __builtin_shufflevector(quads[i], quads[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    const Eight high = __builtin_shufflevector(quads[i], quads[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    std::memcpy(to + i * to_stride, &low, sizeof(Eight));
    std::memcpy(to + (i + 4) * to_stride, &high, sizeof(Eight));
  });
}

template <typename From, typename T>
void pack_transposed(const From* b, int64_t ldb, int64_t n, int64_t k, T* packed) {
  constexpr int64_t kWidth = 2 * kVector<T>;
  for (int64_t j = 0; j < n; j += kWidth, packed += kWidth * k) {
    const int64_t columns = n - j < kWidth ? n - j : kWidth;
    const From* from = b + j * ldb;
    int64_t done = 0;  // rows of the panel that are written
    if constexpr (std::is_same_v<From, float> && std::is_same_v<T, float>) {
      for (; columns == kWidth && done + 8 <= k; done += 8) {
        for (int64_t i = 0; i < kWidth; i += 8) {
          transpose_8x8(from + i * ldb + done, ldb, packed + done * kWidth + i, kWidth);
        }
      }
    }
    for (int64_t p = done; p < k; ++p) {
      T* to = packed + p * kWidth;
      for (int64_t i = 0; i < columns; ++i) {
        to[i] = static_cast<T>(from[i * ldb + p]);
      }
      for (int64_t i = columns; i < kWidth; ++i) {
        to[i] = T(0);
      }
    }
  }
}

// C[m, n] = A[m, k] . packed, n rounded up to whole panels: C has room for it.
template <typename T>
void gemm_packed(
    StridedMatrix<T> a, const T* packed, T* c, int64_t ldc, int64_t m, int64_t n, int64_t k) {
  const int64_t width = 2 * kVector<T>;
  for (int64_t j = 0; j < n; j += width, packed += width * k) {
    gemm_panel<T, 2>(a, packed, width, c + j, ldc, m, k, false);
  }
}

}  // namespace trainrt
