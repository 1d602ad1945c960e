// MatMul, MatMulAdd and MatMulWeightGrad by cuBLASLt: one strided batch where the leading dims
// allow it, else one product per index of all but the last of them. Integers take a plain kernel.
#include "graph/kernel_pair.h"
#include "ops/launch.cuh"
#include "ops/matmul_problem.cuh"

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

// What is left of y when there is nothing to multiply: `term`, or zeros.
void without_product(KernelContext& context, bool adds) {
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

void add_bias(KernelContext& context) {
  dispatch_stored(context.node(), context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(
        context,
        num_elements(context.output_shape(0)),
        AddBias<T>{context.input<T>(kBias), context.output<T>(0), context.output_shape(0).back()});
  });
}

Kernel matmul_cuda(const OpContext& op, const DeviceSpec& spec) {
  if (!is_floating(op.input_dtype(0))) {
    return integer_product;
  }
  const bool adds_term = op.has_input(kTerm), adds_bias = op.has_input(kBias);
  const Product p = product_of(op);
  if (p.m * p.n * num_elements(p.batch) == 0) {
    return [](KernelContext&) {};
  }
  if (p.k == 0) {
    return [adds_term, adds_bias](KernelContext& context) {
      without_product(context, adds_term);
      if (adds_bias) {
        add_bias(context);
      }
    };
  }
  const Batches batches = split_batch(p);
  cublas::Problem problem = problem_of(op, p, batches);
  problem.beta = adds_term ? 1 : 0;
  problem.bias = adds_bias && problem.dtype != DType::kFloat64;
  problem.workspace_bytes = cublas::usable_bytes(cublas_workspace(p, spec));
  auto matmul = std::make_shared<cublas::Matmul>(problem);
  return [=](KernelContext& context) {
    const int64_t element = dtype_bytes(problem.dtype);
    const std::byte* a = static_cast<const std::byte*>(context.raw_input(0));
    const std::byte* b = static_cast<const std::byte*>(context.raw_input(1));
    std::byte* y = static_cast<std::byte*>(context.raw_output(0));
    const std::byte* term = adds_term ? static_cast<const std::byte*>(context.raw_input(kTerm)) : y;
    for_each_matrix(batches.outer, [&](int64_t a_offset, int64_t b_offset, int64_t y_offset) {
      const int64_t y_bytes = y_offset * batches.count * element;
      matmul->run(context,
                  a + a_offset * element,
                  b + b_offset * element,
                  y + y_bytes,
                  context.workspace(),
                  term + y_bytes,
                  problem.bias ? context.raw_input(kBias) : nullptr);
    });
    if (adds_bias && !problem.bias) {
      add_bias(context);
    }
  };
}

// The activation's form of cuBLASLt, if it has one. Its Gelu is the one by tanh; what it stores or
// reads beside the result has rows of a multiple of 8.
cublas::Epilogue epilogue_of(const NodePair& pair, int64_t n) {
  const Node& node = pair.second.node();
  const bool tanh = node.attributes.get_string("approximate", "none") == "tanh";
  if (node.op_type == "Relu" && !pair.keeps) {
    return cublas::Epilogue::kRelu;
  }
  if (node.op_type == "Gelu" && tanh && (!pair.keeps || n % 8 == 0)) {
    return pair.keeps ? cublas::Epilogue::kGeluAux : cublas::Epilogue::kGelu;
  }
  if (node.op_type == "GeluGrad" && tanh && pair.joined == 1 && !pair.keeps && n % 8 == 0) {
    return cublas::Epilogue::kGeluGrad;
  }
  return cublas::Epilogue::kNone;
}

Kernel activated_cuda(const NodePair& pair, const DeviceSpec& spec) {
  const OpContext& op = pair.first;
  const Product p = product_of(op);
  const Batches batches = split_batch(p);
  const bool one = batches.count == 1 && num_elements(batches.outer.batch) == 1;
  const bool low = is_floating(op.input_dtype(0)) && op.input_dtype(0) != DType::kFloat64;
  const bool same = op.output_type(0) == pair.second.output_type(0);
  cublas::Problem problem = problem_of(op, p, batches);
  problem.epilogue = epilogue_of(pair, p.n);
  problem.bias = op.has_input(kBias);
  // What Gelu is taken of may come to lie over the term, and cuBLASLt says of no output but its
  // result that it may be C.
  const bool plain = problem.epilogue == cublas::Epilogue::kGeluGrad
                         ? !problem.bias && !op.has_input(kTerm)
                         : problem.epilogue != cublas::Epilogue::kGeluAux || !op.has_input(kTerm);
  if (!one || !low || !same || !plain || problem.epilogue == cublas::Epilogue::kNone ||
      p.m * p.n * p.k == 0) {
    return {};
  }
  problem.beta = op.has_input(kTerm) ? 1 : 0;
  problem.workspace_bytes = cublas::usable_bytes(cublas_workspace(p, spec));
  const auto matmul = std::make_shared<cublas::Matmul>(problem);
  const Kernel first = make_kernel(op, spec), second = make_kernel(pair.second, spec);
  const Node* second_node = &pair.second.node();
  const int other = static_cast<int>(op.node().inputs.size());  // GeluGrad's x
  return [=](KernelContext& context) {
    const void* bias = problem.bias ? context.raw_input(kBias) : nullptr;
    void* aux = problem.epilogue == cublas::Epilogue::kGeluAux    ? context.raw_output(0)
                : problem.epilogue == cublas::Epilogue::kGeluGrad ? context.raw_input(other)
                                                                  : nullptr;
    const bool ran = matmul->try_run(context,
                                     context.raw_input(0),
                                     context.raw_input(1),
                                     context.raw_output(1),
                                     context.workspace(),
                                     problem.beta != 0 ? context.raw_input(kTerm) : nullptr,
                                     bias,
                                     aux);
    if (!ran) {
      run_one_by_one(first, *second_node, second, context);
    }
  };
}

const RegisterKernelPair kMatMulRelu{"MatMul", "Relu", Backend::kCuda, activated_cuda};
const RegisterKernelPair kMatMulAddRelu{"MatMulAdd", "Relu", Backend::kCuda, activated_cuda};
const RegisterKernelPair kMatMulGelu{"MatMul", "Gelu", Backend::kCuda, activated_cuda};
const RegisterKernelPair kMatMulAddGelu{"MatMulAdd", "Gelu", Backend::kCuda, activated_cuda};
const RegisterKernelPair kMatMulGeluGrad{"MatMul", "GeluGrad", Backend::kCuda, activated_cuda};
const RegisterKernel kMatMulAdd{"MatMulAdd", Backend::kCuda, matmul_cuda};
const RegisterKernel kMatMul{"MatMul", Backend::kCuda, matmul_cuda};
const RegisterKernel kMatMulWeightGrad{"MatMulWeightGrad", Backend::kCuda, matmul_cuda};

}  // namespace

}  // namespace trainrt
