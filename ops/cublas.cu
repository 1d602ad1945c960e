// See ops/cublas.cuh.
#include <algorithm>
#include <numeric>

#include "graph/base/cuda_check.h"
#include "ops/cublas.cuh"

namespace trainrt::cublas {

namespace {

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

}  // namespace

struct Matmul::Impl {
  Problem p;
  Layout a, b, y;
  Description description;
  cublasLtMatmulAlgo_t algorithm{};
  bool chosen = false, refused = false;

  explicit Impl(const Problem& problem) : p(problem) {
    make_layout(a, p, p.a, p.a_batch_stride);
    make_layout(b, p, p.b, p.b_batch_stride);
    make_layout(y, p, y_dtype(p), p.a.rows, p.b.columns, p.y_stride, p.y_batch_stride);
  }

  // Reduction schemes are all deterministic but for those that add in place.
  void describe(bool tf32) {
    const cudaDataType_t scale = p.dtype == DType::kFloat64 ? CUDA_R_64F : CUDA_R_32F;
    TRAINRT_CUDA_CHECK(cublasLtMatmulDescCreate(&description.value, compute_type(p, tf32), scale));
    const auto operation = [](const Operand& operand) {
      return static_cast<int32_t>(operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    };
    set(description.value, CUBLASLT_MATMUL_DESC_TRANSA, operation(p.b));
    set(description.value, CUBLASLT_MATMUL_DESC_TRANSB, operation(p.a));
  }

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

  // False: there is no algorithm.
  bool choose(CudaContext& context, const void* bias, void* aux) {
    if (description.value == nullptr) {
      describe(context.tf32());
    }
    describe_epilogue(bias, aux);
    Preference preference;
    TRAINRT_CUDA_CHECK(cublasLtMatmulPreferenceCreate(&preference.value));
    set(preference.value,
        CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        static_cast<uint64_t>(p.workspace_bytes));
    if (context.deterministic()) {
      set(preference.value,
          CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
          static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_MASK &
                                ~static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_INPLACE)));
    }
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
    cublasLtMatmulHeuristicResult_t best{};
    int found = 0;
    const cublasStatus_t asked = cublasLtMatmulAlgoGetHeuristic(context.cublas(),
                                                                description.value,
                                                                b.value,
                                                                a.value,
                                                                y.value,
                                                                y.value,
                                                                preference.value,
                                                                1,
                                                                &best,
                                                                &found);
    if (asked != CUBLAS_STATUS_NOT_SUPPORTED) {
      TRAINRT_CUDA_CHECK(asked);
    }
    algorithm = best.algo;
    chosen = asked == CUBLAS_STATUS_SUCCESS && found > 0;
    return chosen;
  }

  void require_algorithm(bool there_is) const {
    TRAINRT_REQUIRE(there_is,
                    kDevice,
                    "cuBLASLt has no algorithm for a product of ",
                    dtype_name(p.dtype),
                    "[",
                    p.a.rows,
                    ", ",
                    p.a.columns,
                    "] and [",
                    p.b.rows,
                    ", ",
                    p.b.columns,
                    "] within ",
                    p.workspace_bytes,
                    " bytes of workspace");
  }
};

Matmul::Matmul(const Problem& problem) : impl_(std::make_unique<Impl>(problem)) {}

Matmul::~Matmul() = default;

bool Matmul::works(CudaContext& context, const void* bias, void* aux) {
  Impl& m = *impl_;
  m.refused = m.refused || (!m.chosen && !m.choose(context, bias, aux));
  return !m.refused;
}

void Matmul::run(CudaContext& context,
                 const void* a,
                 const void* b,
                 void* y,
                 std::span<std::byte> workspace,
                 const void* c,
                 const void* bias,
                 void* aux) {
  Impl& m = *impl_;
  if (!m.chosen) {
    m.require_algorithm(m.choose(context, bias, aux));
  } else {
    m.set_pointers(bias, aux);
  }
  std::byte* aligned = workspace.data();
  if (!workspace.empty()) {
    const uint64_t address = reinterpret_cast<uint64_t>(aligned);
    aligned += (kCublasAlignment - address % kCublasAlignment) % kCublasAlignment;
  }
  const float alpha32 = static_cast<float>(m.p.alpha), beta32 = static_cast<float>(m.p.beta);
  const bool wide = m.p.dtype == DType::kFloat64;
  TRAINRT_CUDA_CHECK(cublasLtMatmul(context.cublas(),
                                    m.description.value,
                                    wide ? static_cast<const void*>(&m.p.alpha) : &alpha32,
                                    b,
                                    m.b.value,
                                    a,
                                    m.a.value,
                                    wide ? static_cast<const void*>(&m.p.beta) : &beta32,
                                    c == nullptr ? y : c,
                                    m.y.value,
                                    y,
                                    m.y.value,
                                    &m.algorithm,
                                    m.p.workspace_bytes > 0 ? aligned : nullptr,
                                    static_cast<size_t>(m.p.workspace_bytes),
                                    context.cuda_stream()));
}

}  // namespace trainrt::cublas
