// MatMul, MatMulAdd and MatMulWeightGrad by cuBLASLt: one strided batch where the leading dims
// allow it, else one product per index of all but the last of them. Integers take a plain kernel.
#include <numeric>

#include "ops/cublas.cuh"
#include "ops/launch.cuh"
#include "ops/matmul.h"

namespace trainrt {

namespace {

template <typename T>
struct IntegerProduct {
  const T *a, *b;
  T* y;
  int64_t n, k, a_row, a_column, b_row, b_column;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t i = index / n, j = index % n;
    T sum = 0;
    for (int64_t inner = 0; inner < k; ++inner) {
      sum = static_cast<T>(sum + a[i * a_row + inner * a_column] * b[inner * b_row + j * b_column]);
    }
    y[index] = sum;
  }
};

void integer_product(KernelContext& context) {
  const Product p = product_of(context);
  dispatch_numeric(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    for_each_matrix(p, [&](int64_t a, int64_t b, int64_t y) {
      launch(context,
             p.m * p.n,
             IntegerProduct<T>{context.input<T>(0) + a,
                               context.input<T>(1) + b,
                               context.output<T>(0) + y,
                               p.n,
                               p.k,
                               p.a_row,
                               p.a_column,
                               p.b_row,
                               p.b_column});
    });
  });
}

cublas::Operand operand(int64_t rows, int64_t columns, int64_t row, int64_t column) {
  const bool transposed = column != 1;
  return {rows, columns, transposed ? column : row, transposed};
}

// The batch dims but the last, whose matrices one call takes.
struct Batches {
  Product outer;  // its `batch` is without the last dim
  int64_t count = 1, a_stride = 0, b_stride = 0;
};

Batches split_batch(const Product& p) {
  Batches batches{p};
  if (!p.batch.empty()) {
    batches.count = p.batch.back();
    batches.a_stride = p.a_batch_strides.back();
    batches.b_stride = p.b_batch_strides.back();
    batches.outer.batch.pop_back();
    batches.outer.a_batch_strides.pop_back();
    batches.outer.b_batch_strides.pop_back();
  }
  return batches;
}

// What offsets of these strides keep of the arena's alignment.
int64_t alignment_of(const Shape& strides, DType dtype) {
  int64_t alignment = cublas::kArenaBytes;
  for (const int64_t stride : strides) {
    alignment = std::gcd(alignment, stride * dtype_bytes(dtype));
  }
  return alignment;
}

template <typename T>
struct AddBias {
  using C = ComputeOf<T>;
  const T* bias;
  T* y;
  int64_t n;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    y[i] = to_storage<T>(to_compute<C>(y[i]) + to_compute<C>(bias[i % n]));
  }
};

// y holds `term` when the product starts, which is added to it.
void begin_sum(KernelContext& context, bool adds) {
  const size_t bytes = static_cast<size_t>(context.output_type(0).bytes());
  void* y = context.raw_output(0);
  const cudaStream_t stream = cuda_context(context).cuda_stream();
  if (!adds) {
    TRAINRT_CUDA_CHECK(cudaMemsetAsync(y, 0, bytes, stream));
  } else if (context.raw_input(kTerm) != y) {
    TRAINRT_CUDA_CHECK(
        cudaMemcpyAsync(y, context.raw_input(kTerm), bytes, cudaMemcpyDeviceToDevice, stream));
  }
}

Kernel product_cuda(const OpContext& op, const DeviceSpec& spec, bool adds) {
  if (!is_floating(op.input_dtype(0))) {
    return integer_product;
  }
  const Product p = product_of(op);
  if (p.m * p.n * num_elements(p.batch) == 0) {
    return [](KernelContext&) {};
  }
  if (p.k == 0) {
    return [adds](KernelContext& context) { begin_sum(context, adds); };
  }
  const Batches batches = split_batch(p);
  cublas::Problem problem;
  problem.dtype = op.input_dtype(0);
  problem.a = operand(p.m, p.k, p.a_row, p.a_column);
  problem.b = operand(p.k, p.n, p.b_row, p.b_column);
  problem.y_stride = p.n;
  problem.batch = batches.count;
  problem.a_batch_stride = batches.a_stride;
  problem.b_batch_stride = batches.b_stride;
  problem.y_batch_stride = p.m * p.n;
  problem.a_alignment = alignment_of(batches.outer.a_batch_strides, problem.dtype);
  problem.b_alignment = alignment_of(batches.outer.b_batch_strides, problem.dtype);
  problem.y_alignment = alignment_of({problem.y_batch_stride * batches.count}, problem.dtype);
  problem.beta = adds ? 1 : 0;
  problem.workspace_bytes = cublas::usable_bytes(cublas_workspace(p, spec));
  auto matmul = std::make_shared<cublas::Matmul>(problem);
  return [matmul, batches, problem, adds](KernelContext& context) {
    if (adds) {
      begin_sum(context, adds);
    }
    const int64_t element = dtype_bytes(problem.dtype);
    const std::byte* a = static_cast<const std::byte*>(context.raw_input(0));
    const std::byte* b = static_cast<const std::byte*>(context.raw_input(1));
    std::byte* y = static_cast<std::byte*>(context.raw_output(0));
    for_each_matrix(batches.outer, [&](int64_t a_offset, int64_t b_offset, int64_t y_offset) {
      matmul->run(cuda_context(context),
                  a + a_offset * element,
                  b + b_offset * element,
                  y + y_offset * batches.count * element,
                  context.workspace());
    });
  };
}

Kernel matmul_cuda(const OpContext& op, const DeviceSpec& spec) {
  return product_cuda(op, spec, false);
}

Kernel matmul_add_cuda(const OpContext& op, const DeviceSpec& spec) {
  const Kernel product = product_cuda(op, spec, op.has_input(kTerm));
  return [product](KernelContext& context) {
    product(context);
    if (context.has_input(kBias)) {
      dispatch_stored(context.node(), context.output_dtype(0), [&](auto tag) {
        using T = decltype(tag);
        launch(context,
               num_elements(context.output_shape(0)),
               AddBias<T>{
                   context.input<T>(kBias), context.output<T>(0), context.output_shape(0).back()});
      });
    }
  };
}

const RegisterKernel kMatMulAdd{"MatMulAdd", Backend::kCuda, matmul_add_cuda};
const RegisterKernel kMatMul{"MatMul", Backend::kCuda, matmul_cuda};
const RegisterKernel kMatMulWeightGrad{"MatMulWeightGrad", Backend::kCuda, matmul_cuda};

}  // namespace

}  // namespace trainrt
