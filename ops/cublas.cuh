// Matrix products by cuBLASLt. cuBLASLt's matrices are column-major; a row-major y = a . b is the
// column-major y^T = b^T . a^T, so b is its first operand and a its second, neither transposed.
#pragma once

#include <cublasLt.h>

#include <memory>

#include "graph/cuda_context.h"
#include "ops/matmul.h"

namespace trainrt::cublas {

inline constexpr int64_t kArenaBytes = 64;  // what the memory plan aligns tensors to

// A row-major matrix in memory, or its transpose.
struct Operand {
  int64_t rows = 0, columns = 0;  // as the product sees them
  int64_t stride = 0;             // elements between stored rows
  bool transposed = false;        // stored as [columns, rows]
};

// What is done to a sum before it is stored, or beside it.
//   kGeluAux, kGeluGrad  store in `aux` what Gelu is taken of, read it there; its rows lie as y's
//   do kReluGrad            keeps elements whose bit in `aux` is set: bit i % 8 of byte i / 8 of a
//   row,
//                        rows padded to kMaskRowBits. No library page says how the bits lie;
//                        NVIDIA's own tests of cuBLASLt (nvmath-python, test_epilog.py) unpack them
//                        so
//   kSumOfA, kSumOfB     store in `aux` the sums over k of a[m, k] (m of them), of b[k, n] (n)
enum class Epilogue { kNone, kRelu, kGelu, kGeluAux, kGeluGrad, kReluGrad, kSumOfA, kSumOfB };

// y[m, n] = epilogue(alpha a[m, k] . b[k, n] + beta c + bias[n]), `batch` times at the given
// distances (in elements; 0 reads the same matrix again). c lies as y does.
struct Problem {
  DType dtype = DType::kFloat32;
  bool wide_y = false;  // y is float32 beside a and b of 16 bits
  Operand a, b;
  int64_t y_stride = 0;
  int64_t batch = 1;
  int64_t a_batch_stride = 0, b_batch_stride = 0, y_batch_stride = 0;
  // What every address that a, b and y will ever have is a multiple of, in bytes.
  int64_t a_alignment = kArenaBytes, b_alignment = kArenaBytes, y_alignment = kArenaBytes;
  double alpha = 1, beta = 0;
  bool bias = false;  // neither for float64
  Epilogue epilogue = Epilogue::kNone;
  int64_t workspace_bytes = 0;
};

// Descriptors, and the algorithm that is chosen at the first run: the first that does run, of those
// that cuBLASLt's heuristic proposes.
class Matmul {
 public:
  explicit Matmul(const Problem& problem);
  ~Matmul();
  Matmul(const Matmul&) = delete;
  Matmul& operator=(const Matmul&) = delete;
  // `workspace` holds problem.workspace_bytes plus kCublasAlignment, or may be empty.
  // Without a `c` it is y. False: cuBLASLt has no algorithm, and y and aux may hold anything. The
  // answer is the same at every call.
  bool try_run(KernelContext& context,
               const void* a,
               const void* b,
               void* y,
               std::span<std::byte> workspace,
               const void* c = nullptr,
               const void* bias = nullptr,
               void* aux = nullptr);
  // The same where there is no epilogue: without an algorithm a plain kernel runs, and a warning
  // says so.
  void run(KernelContext& context,
           const void* a,
           const void* b,
           void* y,
           std::span<std::byte> workspace,
           const void* c = nullptr,
           const void* bias = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Bytes left of a workspace after aligning it.
inline int64_t usable_bytes(int64_t workspace) {
  return workspace > kCublasAlignment ? workspace - kCublasAlignment : 0;
}

}  // namespace trainrt::cublas
