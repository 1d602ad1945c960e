// See ops/cublas.cuh.
#include <algorithm>
#include <array>
#include <numeric>

#include "graph/base/cuda_check.h"
#include "graph/base/log.h"
#include "ops/cublas.cuh"
#include "ops/launch.cuh"

namespace trainrt::cublas {

namespace {

constexpr int kMostAlgorithms = 4;

cudaDataType_t data_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kFloat64:
      return CUDA_R_64F;
    case DType::kFloat16:
      return CUDA_R_16F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
    default:
      TRAINRT_FAIL(kUnsupported, "cuBLASLt product of ", dtype_name(dtype));
  }
}

// Sums are float32 for all but float64.
cublasComputeType_t compute_type(const Problem& p, bool tf32) {
  if (p.dtype == DType::kFloat64) {
    return CUBLAS_COMPUTE_64F;
  }
  return p.dtype == DType::kFloat32 && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

template <typename Descriptor, auto kDestroy>
struct Owned {
  Descriptor value = nullptr;
  Owned() = default;
  ~Owned() {
    if (value != nullptr) {
      static_cast<void>(kDestroy(value));
    }
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
};

using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Description = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

template <typename T>
void set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, T value) {
  TRAINRT_CUDA_CHECK(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof(value)));
}
template <typename T>
void set(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t attribute, T value) {
  TRAINRT_CUDA_CHECK(cublasLtMatmulDescSetAttribute(description, attribute, &value, sizeof(value)));
}
template <typename T>
void set(cublasLtMatmulPreference_t preference,
         cublasLtMatmulPreferenceAttributes_t attribute,
         T value) {
  TRAINRT_CUDA_CHECK(
      cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
}

// The column-major view of a stored row-major matrix [rows, columns]: [columns, rows].
void make_layout(Layout& layout,
                 const Problem& p,
                 DType dtype,
                 int64_t rows,
                 int64_t columns,
                 int64_t stride,
                 int64_t batch_stride) {
  TRAINRT_CUDA_CHECK(cublasLtMatrixLayoutCreate(&layout.value,
                                                data_type(dtype),
                                                static_cast<uint64_t>(columns),
                                                static_cast<uint64_t>(rows),
                                                stride));
  if (p.batch > 1) {
    set(layout.value, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(p.batch));
    set(layout.value, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, batch_stride);
  }
}

void make_layout(Layout& layout, const Problem& p, const Operand& operand, int64_t batch_stride) {
  const bool t = operand.transposed;
  make_layout(layout,
              p,
              p.dtype,
              t ? operand.columns : operand.rows,
              t ? operand.rows : operand.columns,
              operand.stride,
              batch_stride);
}

DType y_dtype(const Problem& p) {
  return p.wide_y ? DType::kFloat32 : p.dtype;
}

// What the addresses of all matrices of a batch are multiples of.
uint32_t alignment_of(int64_t alignment, int64_t batch_stride, DType dtype) {
  return static_cast<uint32_t>(std::gcd(alignment, batch_stride * dtype_bytes(dtype)));
}

// What a product does to one element of y, numbered by batch, row and column.
template <typename T, typename Y>
struct ProductElement {
  using C = ComputeOf<T>;
  const T *a, *b;
  const Y *c, *bias;
  Y* y;
  int64_t m, n, k, a_row, a_column, b_row, b_column, y_row, a_batch, b_batch, y_batch;
  C alpha, beta;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t j = index % n, i = index / n % m, batch = index / n / m;
    const T* const row = a + batch * a_batch + i * a_row;
    const T* const column = b + batch * b_batch + j * b_column;
    C sum = 0;
    for (int64_t inner = 0; inner < k; ++inner) {
      sum += to_compute<C>(row[inner * a_column]) * to_compute<C>(column[inner * b_row]);
    }
    const int64_t at = batch * y_batch + i * y_row + j;
    C value = alpha * sum;
    if (beta != C(0)) {
      value += beta * to_compute<C>(c[at]);
    }
    if (bias != nullptr) {
      value += to_compute<C>(bias[j]);
    }
    y[at] = to_storage<Y>(value);
  }
};

template <typename T, typename Y>
void plain_product(KernelContext& context,
                   const Problem& p,
                   const void* a,
                   const void* b,
                   void* y,
                   const void* c,
                   const void* bias) {
  using C = ComputeOf<T>;
  launch(context,
         p.batch * p.a.rows * p.b.columns,
         ProductElement<T, Y>{static_cast<const T*>(a),
                              static_cast<const T*>(b),
                              static_cast<const Y*>(c == nullptr ? y : c),
                              static_cast<const Y*>(bias),
                              static_cast<Y*>(y),
                              p.a.rows,
                              p.b.columns,
                              p.a.columns,
                              p.a.transposed ? 1 : p.a.stride,
                              p.a.transposed ? p.a.stride : 1,
                              p.b.transposed ? 1 : p.b.stride,
                              p.b.transposed ? p.b.stride : 1,
                              p.y_stride,
                              p.a_batch_stride,
                              p.b_batch_stride,
                              p.y_batch_stride,
                              static_cast<C>(p.alpha),
                              static_cast<C>(p.beta)});
}

}  // namespace

struct Matmul::Impl {
  Problem p;
  Layout a, b, y;
  Description description;
  // What the heuristic proposes, best first; those before `at` have failed.
  std::array<cublasLtMatmulHeuristicResult_t, kMostAlgorithms> proposals{};
  size_t at = 0, end = 0;
  std::vector<std::string> refusals;
  bool asked = false;
  bool settled = false;  // proposals[at] has run
  bool warned = false;

  explicit Impl(const Problem& problem) : p(problem) {
    if (p.a.columns == 0 || is_empty()) {
      asked = true;  // cuBLASLt knows no matrices without elements
      return;
    }
    make_layout(a, p, p.a, p.a_batch_stride);
    make_layout(b, p, p.b, p.b_batch_stride);
    make_layout(y, p, y_dtype(p), p.a.rows, p.b.columns, p.y_stride, p.y_batch_stride);
  }

  void describe(bool tf32) {
    const cudaDataType_t scale = p.dtype == DType::kFloat64 ? CUDA_R_64F : CUDA_R_32F;
    TRAINRT_CUDA_CHECK(cublasLtMatmulDescCreate(&description.value, compute_type(p, tf32), scale));
    const auto operation = [](const Operand& operand) {
      return static_cast<int32_t>(operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    };
    set(description.value, CUBLASLT_MATMUL_DESC_TRANSA, operation(p.b));
    set(description.value, CUBLASLT_MATMUL_DESC_TRANSB, operation(p.a));
  }

  // How the sums of parts of k are added up. Schemes are deterministic but for the one in place.
  // All but the one in the type of computation keep partial sums in y's type, which 16 bits round
  // and overflow.
  uint32_t reduction_schemes(bool deterministic) const {
    if (dtype_bytes(y_dtype(p)) == 2) {
      return CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    }
    return deterministic
               ? CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE
               : CUBLASLT_REDUCTION_SCHEME_MASK;
  }

  bool is_empty() const { return p.batch * p.a.rows * p.b.columns == 0; }
  bool has_aux() const {
    return p.epilogue == Epilogue::kGeluAux || p.epilogue == Epilogue::kGeluGrad ||
           p.epilogue == Epilogue::kReluGrad;
  }
  bool has_sums() const {
    return p.epilogue == Epilogue::kSumOfA || p.epilogue == Epilogue::kSumOfB;
  }
  int64_t aux_stride() const {
    return p.epilogue == Epilogue::kReluGrad
               ? (p.b.columns + kMaskRowBits - 1) / kMaskRowBits * kMaskRowBits
               : p.y_stride;
  }

  uint32_t epilogue() const {
    switch (p.epilogue) {
      case Epilogue::kRelu:
        return p.bias ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_RELU;
      case Epilogue::kGelu:
        return p.bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
      case Epilogue::kGeluAux:
        return p.bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
      case Epilogue::kGeluGrad:
        return CUBLASLT_EPILOGUE_DGELU;
      case Epilogue::kReluGrad:
        return CUBLASLT_EPILOGUE_DRELU;
      case Epilogue::kSumOfA:  // cuBLASLt's second operand
        return CUBLASLT_EPILOGUE_BGRADB;
      case Epilogue::kSumOfB:
        return CUBLASLT_EPILOGUE_BGRADA;
      default:
        return p.bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    }
  }

  void set_pointers(const void* bias, void* aux) {
    if (p.bias) {
      set(description.value, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    }
    if (has_sums()) {
      set(description.value, CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(aux));
    }
    if (has_aux()) {
      set(description.value, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux);
    }
  }

  // Before an algorithm is asked for: it depends on how the addresses are aligned.
  void describe_epilogue(const void* bias, void* aux) {
    if (epilogue() != CUBLASLT_EPILOGUE_DEFAULT) {
      set(description.value, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue());
    }
    if (has_aux()) {
      set(description.value, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux_stride());
    }
    set_pointers(bias, aux);
  }

  void ask(CudaContext& context, const void* bias, void* aux) {
    asked = true;
    describe(context.tf32());
    describe_epilogue(bias, aux);
    Preference preference;
    TRAINRT_CUDA_CHECK(cublasLtMatmulPreferenceCreate(&preference.value));
    set(preference.value,
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        static_cast<uint64_t>(p.workspace_bytes));
    set(preference.value,
        CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        reduction_schemes(context.deterministic()));
    set(preference.value,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
        alignment_of(p.b_alignment, p.b_batch_stride, p.dtype));
    set(preference.value,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        alignment_of(p.a_alignment, p.a_batch_stride, p.dtype));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      set(preference.value, attribute, alignment_of(p.y_alignment, p.y_batch_stride, y_dtype(p)));
    }
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(context.cublas(),
                                                                 description.value,
                                                                 b.value,
                                                                 a.value,
                                                                 y.value,
                                                                 y.value,
                                                                 preference.value,
                                                                 kMostAlgorithms,
                                                                 proposals.data(),
                                                                 &found);
    if (status != CUBLAS_STATUS_SUCCESS) {
      refuse("its heuristic", status);
      return;
    }
    end = static_cast<size_t>(found);
  }

  void refuse(const char* attempt, cublasStatus_t status) {
    static_cast<void>(cudaGetLastError());  // not to be found by whoever asks next
    refusals.push_back(concat(attempt, ": ", cuda::failure_of(status).reason));
  }

  cublasStatus_t multiply(CudaContext& context,
                          const void* a_data,
                          const void* b_data,
                          void* y_data,
                          std::span<std::byte> workspace,
                          const void* c_data) const {
    std::byte* aligned = workspace.data();
    if (!workspace.empty()) {
      const uint64_t address = reinterpret_cast<uint64_t>(aligned);
      aligned += (kCublasAlignment - address % kCublasAlignment) % kCublasAlignment;
    }
    const float alpha = static_cast<float>(p.alpha), beta = static_cast<float>(p.beta);
    const bool wide = p.dtype == DType::kFloat64;
    return cublasLtMatmul(context.cublas(),
                          description.value,
                          wide ? static_cast<const void*>(&p.alpha) : &alpha,
                          b_data,
                          b.value,
                          a_data,
                          a.value,
                          wide ? static_cast<const void*>(&p.beta) : &beta,
                          c_data == nullptr ? y_data : c_data,
                          y.value,
                          y_data,
                          y.value,
                          &proposals[at].algo,
                          p.workspace_bytes > 0 ? aligned : nullptr,
                          static_cast<size_t>(p.workspace_bytes),
                          context.cuda_stream());
  }

  void warn(const Node& node) {
    if (std::exchange(warned, true)) {
      return;
    }
    std::string said;
    for (const std::string& refusal : refusals) {
      said += "; " + refusal;
    }
    log_warning("node '",
                node.name,
                "' (",
                node.op_type,
                "): a slow kernel runs: cuBLASLt ",
                cublasLtGetVersion(),
                " has no algorithm for ",
                p.batch,
                " products of ",
                dtype_name(p.dtype),
                shape_string({p.a.rows, p.a.columns}),
                " and ",
                shape_string({p.b.rows, p.b.columns}),
                " within ",
                p.workspace_bytes,
                " bytes of workspace",
                said);
  }
};

Matmul::Matmul(const Problem& problem) : impl_(std::make_unique<Impl>(problem)) {}

Matmul::~Matmul() = default;

bool Matmul::try_run(KernelContext& context,
                     const void* a,
                     const void* b,
                     void* y,
                     std::span<std::byte> workspace,
                     const void* c,
                     const void* bias,
                     void* aux) {
  Impl& m = *impl_;
  CudaContext& cuda = cuda_context(context);
  if (!m.asked) {
    m.ask(cuda, bias, aux);
  } else if (m.at < m.end) {
    m.set_pointers(bias, aux);
  }
  for (; m.at < m.end; ++m.at) {
    // Where its own state is no success, a proposal holds nothing.
    const cublasStatus_t state = m.proposals[m.at].state;
    const cublasStatus_t status =
        state == CUBLAS_STATUS_SUCCESS ? m.multiply(cuda, a, b, y, workspace, c) : state;
    if (status == CUBLAS_STATUS_SUCCESS) {
      m.settled = true;
      return true;
    }
    if (m.settled) {
      cuda::fail(cuda::failure_of(status), "cublasLtMatmul");
    }
    m.refuse("an algorithm", status);
  }
  return false;
}

void Matmul::run(KernelContext& context,
                 const void* a,
                 const void* b,
                 void* y,
                 std::span<std::byte> workspace,
                 const void* c,
                 const void* bias) {
  const Problem& p = impl_->p;
  TRAINRT_CHECK(p.epilogue == Epilogue::kNone);
  if (impl_->is_empty() || try_run(context, a, b, y, workspace, c, bias)) {
    return;
  }
  if (p.a.columns > 0) {
    impl_->warn(context.node());
  }
  dispatch_stored(context.node(), p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (p.wide_y) {
      plain_product<T, float>(context, p, a, b, y, c, bias);
    } else {
      plain_product<T, T>(context, p, a, b, y, c, bias);
    }
  });
}

}  // namespace trainrt::cublas
