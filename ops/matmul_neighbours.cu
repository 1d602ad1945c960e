// MatMulReluGrad and MatMulWeightBiasGrad by cuBLASLt's epilogues, or by a product and a kernel of
// our own: for float64, and where cuBLASLt has no algorithm with the epilogue.
#include <cublasLt.h>

#include <utility>

#include "graph/base/log.h"
#include "ops/launch.cuh"
#include "ops/matmul_problem.cuh"
#include "ops/reduce.cuh"
#include "ops/reduce_rules.h"

namespace trainrt {

namespace {

// 32 signs of a row of y, as cublas::Epilogue::kReluGrad reads them.
template <typename T>
struct SignMask {
  const T* y;
  uint32_t* mask;
  int64_t n, row_words;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    using C = ComputeOf<T>;
    const int64_t row = index / row_words, first = index % row_words * 32;
    uint32_t bits = 0;
    for (int64_t i = first; i < first + 32 && i < n; ++i) {
      bits |= static_cast<uint32_t>(to_compute<C>(y[row * n + i]) > C(0)) << (i - first);
    }
    mask[index] = bits;
  }
};

template <typename T>
struct KeepMasked {
  const uint32_t* mask;
  T* dx;
  int64_t n, row_words;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t row = index / n, i = index % n;
    if ((mask[row * row_words + i / 32] >> (i % 32) & 1) == 0) {
      dx[index] = to_storage<T>(ComputeOf<T>(0));
    }
  }
};

// A product with an epilogue, and without.
class JoinedProduct {
 public:
  JoinedProduct(const OpContext& op, const DeviceSpec& spec, cublas::Epilogue epilogue)
      : alone_(problem(op, spec, cublas::Epilogue::kNone)),
        joined_(problem(op, spec, epilogue)),
        has_epilogue_(op.input_dtype(0) != DType::kFloat64) {}

  // Null `aux`: without the epilogue. False when the epilogue's work is left to be done.
  bool run(KernelContext& context, std::span<std::byte> workspace, void* aux) {
    const void* const first = context.raw_input(0);
    const void* const second = context.raw_input(1);
    void* const y = context.raw_output(0);
    if (has_epilogue_ && aux != nullptr) {
      if (joined_.try_run(context, first, second, y, workspace, nullptr, nullptr, aux)) {
        return true;
      }
      if (!std::exchange(told_, true)) {
        log_info("node '",
                 context.node().name,
                 "' (",
                 context.node().op_type,
                 "): a product and a kernel run: cuBLASLt ",
                 cublasLtGetVersion(),
                 " has no algorithm that does both");
      }
    }
    alone_.run(context, first, second, y, workspace);
    return false;
  }

 private:
  static cublas::Problem problem(const OpContext& op,
                                 const DeviceSpec& spec,
                                 cublas::Epilogue epilogue) {
    const Product p = product_of(op);
    cublas::Problem problem = problem_of(op, p, split_batch(p));
    problem.workspace_bytes = cublas::usable_bytes(cublas_workspace(p, spec));
    problem.epilogue = epilogue;
    return problem;
  }

  cublas::Matmul alone_, joined_;
  bool has_epilogue_, told_ = false;
};

Kernel relu_grad_cuda(const OpContext& op, const DeviceSpec& spec) {
  const auto product = std::make_shared<JoinedProduct>(op, spec, cublas::Epilogue::kReluGrad);
  const Product p = product_of(op);
  return [product, p](KernelContext& context) {
    const std::span<std::byte> workspace = context.workspace();
    const int64_t row_words = sign_mask_row_bits(p) / 32;
    uint32_t* mask = reinterpret_cast<uint32_t*>(workspace.data());
    dispatch_stored(context.node(), context.output_dtype(0), [&](auto tag) {
      using T = decltype(tag);
      launch(context,
             p.m * row_words,
             SignMask<T>{context.input<T>(kReluResult), mask, p.n, row_words});
      const size_t mask_bytes = static_cast<size_t>(sign_mask_bytes(p));
      if (!product->run(context, workspace.subspan(mask_bytes), mask)) {
        launch(context, p.m * p.n, KeepMasked<T>{mask, context.output<T>(0), p.n, row_words});
      }
    });
  };
}

// Partial sums lie where the product has had its workspace.
void sum_columns(KernelContext& context, int64_t rows, int64_t columns, const void* x, void* sums) {
  const ReductionWalk walk = reduction_walk({rows, columns}, {0});
  const auto run = [&]<typename C>(C) {
    launch_reduction<reduce::Sum, elementwise::StoredFloat<C>, C>(
        context, walk, context.input_dtype(0), x, sums, context.workspace(), 1);
  };
  if (context.input_dtype(0) == DType::kFloat64) {
    run(double{});
  } else {
    run(float{});
  }
}

Kernel weight_bias_grad_cuda(const OpContext& op, const DeviceSpec& spec) {
  const int summed = static_cast<int>(op.attributes().get_int("summed"));
  const auto product = std::make_shared<JoinedProduct>(
      op, spec, summed == 0 ? cublas::Epilogue::kSumOfA : cublas::Epilogue::kSumOfB);
  const int64_t rows = product_of(op).k;
  return [product, summed, rows](KernelContext& context) {
    void* sums = context.has_output(1) ? context.raw_output(1) : nullptr;
    const bool done = context.has_output(0) && product->run(context, context.workspace(), sums);
    if (done || sums == nullptr) {
      return;
    }
    sum_columns(context, rows, context.input_shape(summed).back(), context.raw_input(summed), sums);
  };
}

const RegisterKernel kMatMulReluGrad{"MatMulReluGrad", Backend::kCuda, relu_grad_cuda};
const RegisterKernel kMatMulWeightBiasGrad{
    "MatMulWeightBiasGrad", Backend::kCuda, weight_bias_grad_cuda};

}  // namespace

}  // namespace trainrt
