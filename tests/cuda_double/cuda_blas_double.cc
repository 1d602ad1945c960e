// The cuBLASLt of the double: column-major products of real numbers, summed in the compute type,
// and what cublasLtMatmul documents as invalid.
#include <cublasLt.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "graph/dtype.h"
#include "tests/cuda_double/cuda_double.h"

struct cublasLtContext {
  int device = 0;
};

namespace {

struct Layout {
  cudaDataType type = CUDA_R_32F;
  uint64_t rows = 0, columns = 0;
  int64_t ld = 0;
  int32_t batch = 1;
  int64_t batch_stride = 0;

  // From the first byte to past the last.
  size_t extent() const;
};

struct Description {
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  cudaDataType scale = CUDA_R_32F;
  int32_t trans_a = CUBLAS_OP_N, trans_b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  void* aux = nullptr;
  int64_t aux_ld = 0;

  bool adds_bias() const { return (epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }
  bool is(uint32_t form) const { return (epilogue & ~CUBLASLT_EPILOGUE_BIAS) == form; }
  bool stores_aux() const { return is(CUBLASLT_EPILOGUE_GELU_AUX); }
  bool reads_aux() const { return epilogue == CUBLASLT_EPILOGUE_DGELU; }
  bool reads_mask() const { return epilogue == CUBLASLT_EPILOGUE_DRELU; }
  bool sums_a() const { return epilogue == CUBLASLT_EPILOGUE_BGRADA; }
  bool sums_b() const { return epilogue == CUBLASLT_EPILOGUE_BGRADB; }
  // Those that the back end uses.
  bool known() const {
    return epilogue == CUBLASLT_EPILOGUE_DEFAULT || epilogue == CUBLASLT_EPILOGUE_BIAS ||
           is(CUBLASLT_EPILOGUE_RELU) || is(CUBLASLT_EPILOGUE_GELU) || stores_aux() ||
           reads_aux() || reads_mask() || sums_a() || sums_b();
  }
};

struct Preference {
  uint64_t workspace = 0;
  uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_MASK;
  uint32_t alignment[4] = {256, 256, 256, 256};
};

// What the double's heuristic hands out as an algorithm: it must come back to the same product.
struct Algorithm {
  uint32_t magic = 0;
  int16_t index = 0;    // among those handed out
  bool narrow = false;  // sums are rounded to the output's type after each addition
  uint64_t m = 0, n = 0, k = 0;
  uint32_t epilogue = 0;
  uint32_t alignment[4] = {};
  uint64_t workspace = 0;
};
constexpr double kGeluSlope = 0.79788456080286535588, kGeluCubic = 0.044715;
constexpr uint32_t kMagic = 0x74726169;
constexpr int kNumAlgorithms = 2;  // for a product that has any
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t));

using cuda_double::Fault;
Fault fault_of(const Algorithm& algorithm) {
  return cuda_double::fault_of("L" + std::to_string(algorithm.index));
}

size_t bytes_of(cudaDataType type) {
  switch (type) {
    case CUDA_R_64F:
      return 8;
    case CUDA_R_32F:
      return 4;
    case CUDA_R_16F:
    case CUDA_R_16BF:
      return 2;
    default:
      return 0;
  }
}

size_t Layout::extent() const {
  const int64_t last = (static_cast<int64_t>(columns) - 1) * ld + static_cast<int64_t>(rows) +
                       (batch - 1) * batch_stride;
  return static_cast<size_t>(last) * bytes_of(type);
}

Layout& layout(cublasLtMatrixLayout_t handle) {
  return *reinterpret_cast<Layout*>(handle);
}
Description& description(cublasLtMatmulDesc_t handle) {
  return *reinterpret_cast<Description*>(handle);
}
Preference& preference(cublasLtMatmulPreference_t handle) {
  return *reinterpret_cast<Preference*>(handle);
}

double load(const void* data, cudaDataType type, int64_t i) {
  switch (type) {
    case CUDA_R_64F:
      return static_cast<const double*>(data)[i];
    case CUDA_R_32F:
      return static_cast<double>(static_cast<const float*>(data)[i]);
    case CUDA_R_16F:
      return static_cast<double>(static_cast<float>(static_cast<const trainrt::Float16*>(data)[i]));
    default:
      return static_cast<double>(
          static_cast<float>(static_cast<const trainrt::BFloat16*>(data)[i]));
  }
}

void store(void* data, cudaDataType type, int64_t i, double value) {
  switch (type) {
    case CUDA_R_64F:
      static_cast<double*>(data)[i] = value;
      return;
    case CUDA_R_32F:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      return;
    case CUDA_R_16F:
      static_cast<trainrt::Float16*>(data)[i] = trainrt::Float16(static_cast<float>(value));
      return;
    default:
      static_cast<trainrt::BFloat16*>(data)[i] = trainrt::BFloat16(static_cast<float>(value));
  }
}

// TF32 keeps 10 bits of the mantissa of what is multiplied.
double rounded(double value, const Description& d) {
  if (d.compute != CUBLAS_COMPUTE_32F_FAST_TF32) {
    return value;
  }
  float narrow = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof(bits));
  bits = (bits + 0x1000u) & ~0x1fffu;
  std::memcpy(&narrow, &bits, sizeof(bits));
  return static_cast<double>(narrow);
}

// Sums of `count` lines of a matrix, whose elements are `step` apart.
void sum_over_k(const void* data,
                const Layout& layout,
                int64_t line,
                int64_t step,
                uint64_t count,
                uint64_t k,
                const void* sums,
                cudaDataType type) {
  for (int64_t i = 0; i < static_cast<int64_t>(count); ++i) {
    double sum = 0;
    for (int64_t at = 0; at < static_cast<int64_t>(k); ++at) {
      sum += load(data, layout.type, i * line + at * step);
    }
    store(const_cast<void*>(sums), type, i, sum);
  }
}

double gelu(double x) {
  return 0.5 * x * (1 + std::tanh(kGeluSlope * (x + kGeluCubic * x * x * x)));
}

double gelu_slope(double x) {
  const double t = std::tanh(kGeluSlope * (x + kGeluCubic * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * kGeluSlope * (1 + 3 * kGeluCubic * x * x);
}

struct Sizes {
  uint64_t m = 0, n = 0, k = 0;
  bool valid = false;
};

bool valid_layout(const Layout& l) {
  return bytes_of(l.type) > 0 && l.rows > 0 && l.columns > 0 &&
         l.ld >= static_cast<int64_t>(l.rows) && l.batch >= 1;
}

Sizes sizes_of(const Description& d, const Layout& a, const Layout& b, const Layout& y) {
  Sizes s;
  const bool ta = d.trans_a == CUBLAS_OP_T, tb = d.trans_b == CUBLAS_OP_T;
  s.m = ta ? a.columns : a.rows;
  s.k = ta ? a.rows : a.columns;
  s.n = tb ? b.rows : b.columns;
  const bool computes = d.compute == CUBLAS_COMPUTE_64F
                            ? a.type == CUDA_R_64F && d.scale == CUDA_R_64F
                            : a.type != CUDA_R_64F && d.scale == CUDA_R_32F;
  s.valid = valid_layout(a) && valid_layout(b) && valid_layout(y) && a.type == b.type &&
            (a.type == y.type || (y.type == CUDA_R_32F && bytes_of(a.type) == 2)) && computes &&
            (tb ? b.columns : b.rows) == s.k && y.rows == s.m && y.columns == s.n &&
            a.batch == y.batch && b.batch == y.batch && (y.batch == 1 || y.batch_stride != 0) &&
            d.known() &&
            (d.epilogue == CUBLASLT_EPILOGUE_DEFAULT || d.compute != CUBLAS_COMPUTE_64F);
  return s;
}

// What NVIDIA's own users of the library (nvmath-python) know to have no algorithm: gradients of
// activations with one term to sum, sums of A where it is transposed or has one row, of B where it
// has one column.
bool has_algorithm(const Description& d, const Sizes& s) {
  return !((d.reads_aux() || d.reads_mask()) && s.k == 1) &&
         !(d.sums_a() && (d.trans_a == CUBLAS_OP_T || s.m == 1)) && !(d.sums_b() && s.n == 1);
}

template <typename T, typename U>
cublasStatus_t take(T& to, const void* value, size_t size) {
  if (value == nullptr || size != sizeof(U)) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  U given;
  std::memcpy(&given, value, sizeof(given));
  to = static_cast<T>(given);
  return CUBLAS_STATUS_SUCCESS;
}

// Handles are pointers to what they stand for.
template <typename Handle, typename T>
cublasStatus_t create(const char* call, Handle* handle, const T& made) {
  if (cuda_double::enters_failure(call)) {
    return CUBLAS_STATUS_ALLOC_FAILED;
  }
  *handle = reinterpret_cast<Handle>(new T(made));
  cuda_double::count_alive("cuBLASLt descriptors", 1);
  return CUBLAS_STATUS_SUCCESS;
}

template <typename T>
cublasStatus_t destroy(T* made) {
  cuda_double::count_alive("cuBLASLt descriptors", -1);
  delete made;
  return CUBLAS_STATUS_SUCCESS;
}

bool aligned(const void* data, uint32_t alignment) {
  return reinterpret_cast<uint64_t>(data) % alignment == 0;
}

}  // namespace

#define DOUBLE_ENTRY(code)                     \
  if (cuda_double::enters_failure(__func__)) { \
    return code;                               \
  }

extern "C" {

size_t cublasLtGetVersion() {
  return 130100;
}
const char* cublasLtGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_ALLOC_FAILED ? "CUBLAS_STATUS_ALLOC_FAILED"
                                              : "CUBLAS_STATUS_OF_DOUBLE";
}
const char* cublasLtGetStatusString(cublasStatus_t) {
  return "made to fail, or refused";
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  DOUBLE_ENTRY(CUBLAS_STATUS_ALLOC_FAILED)
  *handle = new cublasLtContext{cuda_double::current_device()};
  cuda_double::count_alive("cuBLASLt handles", 1);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  cuda_double::count_alive("cuBLASLt handles", -1);
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(
    cublasLtMatrixLayout_t* handle, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
  return create(__func__, handle, Layout{type, rows, cols, ld, 1, 0});
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t handle) {
  return destroy(&layout(handle));
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value,
                                                size_t size) {
  DOUBLE_ENTRY(CUBLAS_STATUS_INVALID_VALUE)
  switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
      return take<int32_t, int32_t>(layout(handle).batch, value, size);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
      return take<int64_t, int64_t>(layout(handle).batch_stride, value, size);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* handle,
                                        cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  return create(__func__, handle, Description{compute, scale});
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t handle) {
  return destroy(&description(handle));
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value,
                                              size_t size) {
  DOUBLE_ENTRY(CUBLAS_STATUS_INVALID_VALUE)
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return take<int32_t, int32_t>(description(handle).trans_a, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return take<int32_t, int32_t>(description(handle).trans_b, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return take<uint32_t, uint32_t>(description(handle).epilogue, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return take<const void*, const void*>(description(handle).bias, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return take<void*, void*>(description(handle).aux, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return take<int64_t, int64_t>(description(handle).aux_ld, value, size);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* handle) {
  return create(__func__, handle, Preference{});
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t handle) {
  return destroy(&preference(handle));
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value,
                                                    size_t size) {
  DOUBLE_ENTRY(CUBLAS_STATUS_INVALID_VALUE)
  Preference& p = preference(handle);
  switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
      return take<uint64_t, uint64_t>(p.workspace, value, size);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
      return take<uint32_t, uint32_t>(p.reduction, value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
      return take<uint32_t, uint32_t>(p.alignment[0], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
      return take<uint32_t, uint32_t>(p.alignment[1], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
      return take<uint32_t, uint32_t>(p.alignment[2], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
      return take<uint32_t, uint32_t>(p.alignment[3], value, size);
    default:
      return CUBLAS_STATUS_NOT_SUPPORTED;
  }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t,
                                              cublasLtMatmulDesc_t d,
                                              cublasLtMatrixLayout_t a,
                                              cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t y,
                                              cublasLtMatmulPreference_t p,
                                              int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* found) {
  DOUBLE_ENTRY(CUBLAS_STATUS_INTERNAL_ERROR)
  const Sizes s = sizes_of(description(d), layout(a), layout(b), layout(y));
  if (!s.valid || requested < 1) {
    *found = 0;
    cuda_double::note_misuse(__func__);
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!has_algorithm(description(d), s)) {
    *found = 0;
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const bool narrow = (preference(p).reduction &
                       ~static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)) != 0;
  Algorithm algorithm{
      kMagic, 0, narrow, s.m, s.n, s.k, description(d).epilogue, {}, preference(p).workspace};
  std::memcpy(algorithm.alignment, preference(p).alignment, sizeof(algorithm.alignment));
  *found = std::min(requested, kNumAlgorithms);
  for (; algorithm.index < *found; ++algorithm.index) {
    cublasLtMatmulHeuristicResult_t& result = results[algorithm.index];
    result.state = fault_of(algorithm) == Fault::kRefuses ? CUBLAS_STATUS_NOT_SUPPORTED
                                                          : CUBLAS_STATUS_SUCCESS;
    // What stands in a result without success is nothing to be used.
    std::memset(static_cast<void*>(&result.algo), 0, sizeof(result.algo));
    if (result.state == CUBLAS_STATUS_SUCCESS) {
      std::memcpy(static_cast<void*>(&result.algo), &algorithm, sizeof(algorithm));
    }
    result.workspaceSize = algorithm.workspace;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle,
                              cublasLtMatmulDesc_t d,
                              const void* alpha,
                              const void* a_data,
                              cublasLtMatrixLayout_t a_layout,
                              const void* b_data,
                              cublasLtMatrixLayout_t b_layout,
                              const void* beta,
                              const void* c_data,
                              cublasLtMatrixLayout_t c_layout,
                              void* y_data,
                              cublasLtMatrixLayout_t y_layout,
                              const cublasLtMatmulAlgo_t* algo,
                              void* workspace,
                              size_t workspace_bytes,
                              cudaStream_t stream) {
  DOUBLE_ENTRY(CUBLAS_STATUS_EXECUTION_FAILED)
  const Description desc = description(d);
  const Layout a = layout(a_layout), b = layout(b_layout), y = layout(y_layout);
  const Sizes s = sizes_of(desc, a, b, y);
  Algorithm algorithm;
  std::memcpy(static_cast<void*>(&algorithm), algo, sizeof(algorithm));
  const bool fits =
      algorithm.magic == kMagic && algorithm.m == s.m && algorithm.n == s.n && algorithm.k == s.k &&
      algorithm.epilogue == desc.epilogue && algorithm.workspace <= workspace_bytes &&
      aligned(a_data, algorithm.alignment[0]) && aligned(b_data, algorithm.alignment[1]) &&
      aligned(c_data, algorithm.alignment[2]) && aligned(y_data, algorithm.alignment[3]) &&
      (workspace_bytes == 0 ||
       (aligned(workspace, 256) && cuda_double::is_device_range(workspace, workspace_bytes)));
  const bool on_device = cuda_double::is_device_range(a_data, a.extent()) &&
                         cuda_double::is_device_range(b_data, b.extent()) &&
                         cuda_double::is_device_range(y_data, y.extent());
  // c lies as y does, and may be y. The bias is as long as y's columns, dense, of y's type, and
  // read in words of 16 bytes.
  const Layout c = layout(c_layout);
  const bool c_fits = c.type == y.type && c.rows == y.rows && c.columns == y.columns &&
                      c.batch == y.batch && cuda_double::is_device_range(c_data, c.extent()) &&
                      (c_data != y_data || c.ld == y.ld);
  const bool bias_fits =
      !(desc.adds_bias() || desc.sums_a() || desc.sums_b()) ||
      (aligned(desc.bias, 16) && (desc.adds_bias() || y.batch == 1) &&
       cuda_double::is_device_range(desc.bias, (desc.sums_b() ? s.n : s.m) * bytes_of(y.type)));
  // One matrix, as y lies or wider, in steps of 8 elements; nothing else may be written there. Of a
  // mask the elements are bits, in steps of 128.
  const bool has_aux = desc.stores_aux() || desc.reads_aux() || desc.reads_mask();
  const size_t aux_bytes =
      desc.reads_mask() ? static_cast<size_t>(desc.aux_ld) * s.n / 8
                        : (static_cast<size_t>(desc.aux_ld) * (s.n - 1) + s.m) * bytes_of(y.type);
  // It is not documented that what is stored may lie where c does.
  const double factor = load(alpha, desc.scale, 0), keep = load(beta, desc.scale, 0);
  const auto* aux_begin = static_cast<const std::byte*>(desc.aux);
  const auto* c_begin = static_cast<const std::byte*>(c_data);
  const bool over_c = desc.stores_aux() && keep != 0 && aux_begin < c_begin + c.extent() &&
                      c_begin < aux_begin + aux_bytes;
  const bool aux_fits = !has_aux || (desc.aux_ld % (desc.reads_mask() ? 128 : 8) == 0 &&
                                     desc.aux_ld >= static_cast<int64_t>(s.m) &&
                                     aligned(desc.aux, 16) && y.batch == 1 && desc.aux != y_data &&
                                     !over_c && cuda_double::is_device_range(desc.aux, aux_bytes));
  if (handle == nullptr || !s.valid || !fits || !on_device || !c_fits || !bias_fits || !aux_fits) {
    cuda_double::note_misuse(__func__);
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (fault_of(algorithm) == Fault::kFails) {
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  const std::string kernel = "cuBLASLt " + std::to_string(algorithm.index) + " " +
                             std::to_string(desc.epilogue) + " " + std::to_string(a.type);
  if (cuda_double::load_kernel(stream, kernel) != cudaSuccess) {
    return CUBLAS_STATUS_EXECUTION_FAILED;
  }
  cuda_double::count_product(desc.epilogue);
  if (keep != 0 && c_data != y_data) {
    cuda_double::count_addition();
  }
  const cudaError_t queued = cuda_double::enqueue(stream, [=] {
    double kept = 0;
    const bool ta = desc.trans_a == CUBLAS_OP_T, tb = desc.trans_b == CUBLAS_OP_T;
    for (int64_t batch = 0; batch < y.batch; ++batch) {
      for (int64_t i = 0; i < static_cast<int64_t>(s.m); ++i) {
        for (int64_t j = 0; j < static_cast<int64_t>(s.n); ++j) {
          double sum = 0;
          for (int64_t k = 0; k < static_cast<int64_t>(s.k); ++k) {
            const int64_t at = batch * a.batch_stride + (ta ? k + i * a.ld : i + k * a.ld);
            const int64_t bt = batch * b.batch_stride + (tb ? j + k * b.ld : k + j * b.ld);
            sum +=
                rounded(load(a_data, a.type, at), desc) * rounded(load(b_data, b.type, bt), desc);
            if (algorithm.narrow) {
              store(&kept, y.type, 0, sum);
              sum = load(&kept, y.type, 0);
            }
          }
          const int64_t from = batch * c.batch_stride + i + j * c.ld;
          const double old = keep == 0 ? 0 : keep * load(c_data, c.type, from);
          const double bias = desc.adds_bias() ? load(desc.bias, y.type, i) : 0;
          double value = factor * sum + old + bias;
          const int64_t aux_at = i + j * desc.aux_ld;
          if (desc.stores_aux()) {
            store(desc.aux, y.type, aux_at, value);
          }
          if (desc.is(CUBLASLT_EPILOGUE_RELU)) {
            value = std::max(value, 0.0);
          } else if (desc.is(CUBLASLT_EPILOGUE_GELU) || desc.stores_aux()) {
            value = gelu(value);
          } else if (desc.reads_aux()) {
            value *= gelu_slope(load(desc.aux, y.type, aux_at));
          } else if (desc.reads_mask()) {
            const uint8_t bits = static_cast<const uint8_t*>(desc.aux)[aux_at / 8];
            value = (bits >> (aux_at % 8) & 1) != 0 ? value : 0;
          }
          store(y_data, y.type, batch * y.batch_stride + i + j * y.ld, value);
        }
      }
    }
    if (desc.sums_a()) {
      sum_over_k(a_data, a, ta ? a.ld : 1, ta ? 1 : a.ld, s.m, s.k, desc.bias, y.type);
    } else if (desc.sums_b()) {
      sum_over_k(b_data, b, tb ? 1 : b.ld, tb ? b.ld : 1, s.n, s.k, desc.bias, y.type);
    }
    if (workspace_bytes > 0) {  // whoever keeps something there loses it
      std::memset(workspace, 0xff, workspace_bytes);
    }
  });
  return queued == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
