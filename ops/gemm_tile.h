// Small matrix products inside fused kernels: C (+)= A . B with B's and C's columns contiguous and
// A at any strides. A tile of kTileRows x 2 vectors is held in registers (Goto & van de Geijn,
// "Anatomy of High-Performance Matrix Multiplication", 2008); there is no packing and no threading,
// operands are expected to lie in the caches. Large products belong to oneDNN.
#pragma once

#include <cstdint>
#include <cstring>

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
constexpr int64_t kVector = static_cast<int64_t>(64 / sizeof(T));
constexpr int64_t kTileRows = 8;

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
  using Vector = typename VectorOf<T>::type;
  Vector sums[kRows][kVectors] = {};
  for (int64_t p = 0; p < k; ++p) {
    Vector row[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      std::memcpy(&row[v], b + p * ldb + v * kVector<T>, sizeof(Vector));
    }
    for (int i = 0; i < kRows; ++i) {
      const T factor = a.data[i * a.row + p * a.column];
      for (int v = 0; v < kVectors; ++v) {
        sums[i][v] += factor * row[v];
      }
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      T* out = c + i * ldc + v * kVector<T>;
      Vector before = {};
      if (accumulate) {
        std::memcpy(&before, out, sizeof(before));
      }
      const Vector after = before + sums[i][v];
      std::memcpy(out, &after, sizeof(after));
    }
  }
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
  for (; i + kTileRows <= m; i += kTileRows) {
    gemm_tile<T, kTileRows, kVectors>(
        {a.data + i * a.row, a.row, a.column}, b, ldb, c + i * ldc, ldc, k, accumulate);
  }
  for (; i < m; ++i) {
    gemm_tile<T, 1, kVectors>(
        {a.data + i * a.row, a.row, a.column}, b, ldb, c + i * ldc, ldc, k, accumulate);
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

// Rewrites b[n, k] (rows contiguous) as panels of 2 * kVector columns of its transpose, each panel
// [k][2 * kVector], zeros beyond n. `packed` holds packed_size() elements.
template <typename T>
int64_t packed_size(int64_t n, int64_t k) {
  const int64_t width = 2 * kVector<T>;
  return (n + width - 1) / width * width * k;
}

template <typename T>
void pack_transposed(const T* b, int64_t n, int64_t k, T* packed) {
  const int64_t width = 2 * kVector<T>;
  for (int64_t j = 0; j < n; j += width, packed += width * k) {
    for (int64_t i = 0; i < width; ++i) {
      for (int64_t p = 0; p < k; ++p) {
        packed[p * width + i] = j + i < n ? b[(j + i) * k + p] : T(0);
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
