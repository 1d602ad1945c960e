// The cuDNN of the double: the graph API as a store of attributes, and the graphs of one
// convolution that the back end builds. Everything else is refused.
#include <cudnn.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <vector>

#include "graph/dtype.h"
#include "tests/cuda_double/cuda_double.h"

struct cudnnContext {
  int device = 0;
  cudaStream_t stream = nullptr;
};

namespace {

size_t element_size(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
      return 8;
    case CUDNN_TYPE_DATA_TYPE:
    case CUDNN_TYPE_FLOAT:
    case CUDNN_TYPE_CONVOLUTION_MODE:
    case CUDNN_TYPE_HEUR_MODE:
    case CUDNN_TYPE_NUMERICAL_NOTE:
      return 4;
    default:
      return 0;
  }
}

struct Attribute {
  cudnnBackendAttributeType_t type{};
  std::vector<std::byte> bytes;
};

// Descriptors that others refer to are copied, as the real library allows their deletion.
struct Node {
  cudnnBackendDescriptorType_t type{};
  bool finalized = false;
  std::map<int, Attribute> attributes;
  std::map<int, std::shared_ptr<Node>> children;

  template <typename T>
  std::vector<T> get(int name) const {
    const auto at = attributes.find(name);
    if (at == attributes.end()) {
      return {};
    }
    std::vector<T> values(at->second.bytes.size() / sizeof(T));
    std::memcpy(values.data(), at->second.bytes.data(), values.size() * sizeof(T));
    return values;
  }
  template <typename T>
  T one(int name, T fallback) const {
    const std::vector<T> values = get<T>(name);
    return values.empty() ? fallback : values[0];
  }
  const Node* child(int name) const {
    const auto at = children.find(name);
    return at == children.end() ? nullptr : at->second.get();
  }
};

std::shared_ptr<Node>& node(cudnnBackendDescriptor_t descriptor) {
  return *static_cast<std::shared_ptr<Node>*>(descriptor);
}

// What the double's one engine wants as workspace.
constexpr int64_t kEngineWorkspace = 4096;

struct Tensor {
  cudnnDataType_t type{};
  std::vector<int64_t> dims, strides;
  int64_t uid = 0, alignment = 1;
};

Tensor tensor(const Node& n) {
  return {n.one<cudnnDataType_t>(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_DATA_INT8),
          n.get<int64_t>(CUDNN_ATTR_TENSOR_DIMENSIONS),
          n.get<int64_t>(CUDNN_ATTR_TENSOR_STRIDES),
          n.one<int64_t>(CUDNN_ATTR_TENSOR_UNIQUE_ID, 0),
          n.one<int64_t>(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, 0)};
}

size_t bytes_of(cudnnDataType_t type) {
  return type == CUDNN_DATA_FLOAT                                 ? 4
         : type == CUDNN_DATA_HALF || type == CUDNN_DATA_BFLOAT16 ? 2
                                                                  : 0;
}

size_t extent(const Tensor& t) {
  int64_t last = 1;
  for (size_t d = 0; d < t.dims.size(); ++d) {
    last += (t.dims[d] - 1) * t.strides[d];
  }
  return static_cast<size_t>(last) * bytes_of(t.type);
}

bool valid(const Tensor& t) {
  bool positive = t.dims.size() >= 4 && t.dims.size() <= 5 && t.strides.size() == t.dims.size() &&
                  bytes_of(t.type) > 0 && t.uid > 0 && t.alignment > 0;
  for (size_t d = 0; positive && d < t.dims.size(); ++d) {
    positive = t.dims[d] > 0 && t.strides[d] > 0;
  }
  return positive;
}

enum class Side { kForward, kData, kFilter };

struct Convolution {
  Side side{};
  Tensor x, w, y;
  std::vector<int64_t> strides, dilations, pads;
  bool valid = false;
};

// The names of what an operation refers to.
struct OperationNames {
  int type;
  Side side;
  int x, w, y, convolution, alpha, beta;
};

constexpr OperationNames kOperations[] = {
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
     Side::kForward,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
     Side::kData,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
     Side::kFilter,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA}};

Convolution convolution_of(const Node& operation) {
  Convolution c;
  const auto* names = std::find_if(
      std::begin(kOperations), std::end(kOperations), [&](const OperationNames& candidate) {
        return candidate.type == static_cast<int>(operation.type);
      });
  if (names == std::end(kOperations)) {
    return c;
  }
  c.side = names->side;
  const Node *tx = operation.child(names->x), *tw = operation.child(names->w),
             *ty = operation.child(names->y), *conv = operation.child(names->convolution);
  if (tx == nullptr || tw == nullptr || ty == nullptr || conv == nullptr) {
    return c;
  }
  c.x = tensor(*tx);
  c.w = tensor(*tw);
  c.y = tensor(*ty);
  c.strides = conv->get<int64_t>(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES);
  c.dilations = conv->get<int64_t>(CUDNN_ATTR_CONVOLUTION_DILATIONS);
  c.pads = conv->get<int64_t>(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS);
  const std::vector<int64_t> post = conv->get<int64_t>(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS);
  const size_t spatial = c.x.dims.size() - 2;
  c.valid =
      valid(c.x) && valid(c.w) && valid(c.y) && c.x.type == c.w.type && c.x.type == c.y.type &&
      c.w.dims.size() == c.x.dims.size() && c.y.dims.size() == c.x.dims.size() &&
      c.strides.size() == spatial && c.dilations.size() == spatial && c.pads.size() == spatial &&
      post == c.pads &&
      conv->one<int64_t>(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, 0) == static_cast<int64_t>(spatial) &&
      conv->one<cudnnDataType_t>(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_DATA_HALF) ==
          CUDNN_DATA_FLOAT &&
      conv->one<cudnnConvolutionMode_t>(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_CONVOLUTION) ==
          CUDNN_CROSS_CORRELATION &&
      operation.one<float>(names->alpha, 0) == 1 && operation.one<float>(names->beta, 1) == 0 &&
      c.x.dims[0] == c.y.dims[0] && c.y.dims[1] == c.w.dims[0] && c.x.dims[1] % c.w.dims[1] == 0 &&
      c.y.dims[1] % (c.x.dims[1] / c.w.dims[1]) == 0;
  for (size_t d = 0; c.valid && d < spatial; ++d) {
    const int64_t reach = (c.w.dims[d + 2] - 1) * c.dilations[d] + 1;
    c.valid = (c.x.dims[d + 2] + 2 * c.pads[d] - reach) / c.strides[d] + 1 == c.y.dims[d + 2];
  }
  return c;
}

double load(const void* data, cudnnDataType_t type, int64_t i) {
  if (type == CUDNN_DATA_FLOAT) {
    return static_cast<double>(static_cast<const float*>(data)[i]);
  }
  if (type == CUDNN_DATA_HALF) {
    return static_cast<double>(static_cast<float>(static_cast<const trainrt::Float16*>(data)[i]));
  }
  return static_cast<double>(static_cast<float>(static_cast<const trainrt::BFloat16*>(data)[i]));
}

void store(void* data, cudnnDataType_t type, int64_t i, double value) {
  const float narrow = static_cast<float>(value);
  if (type == CUDNN_DATA_FLOAT) {
    static_cast<float*>(data)[i] = narrow;
  } else if (type == CUDNN_DATA_HALF) {
    static_cast<trainrt::Float16*>(data)[i] = trainrt::Float16(narrow);
  } else {
    static_cast<trainrt::BFloat16*>(data)[i] = trainrt::BFloat16(narrow);
  }
}

// Calls fn(x offset, w offset, y offset) for every multiplication.
template <typename Fn>
void for_each_term(const Convolution& c, const Fn& fn) {
  const size_t spatial = c.strides.size();
  int64_t positions = 1, taps = 1;
  for (size_t d = 0; d < spatial; ++d) {
    positions *= c.y.dims[d + 2];
    taps *= c.w.dims[d + 2];
  }
  const int64_t groups = c.x.dims[1] / c.w.dims[1], m_per_group = c.y.dims[1] / groups;
  for (int64_t p = 0; p < positions; ++p) {
    for (int64_t t = 0; t < taps; ++t) {
      int64_t x_at = 0, y_at = 0, w_at = 0, p_rest = p, t_rest = t;
      bool inside = true;
      for (size_t d = spatial; d-- > 0;) {
        const int64_t out = p_rest % c.y.dims[d + 2], tap = t_rest % c.w.dims[d + 2];
        p_rest /= c.y.dims[d + 2];
        t_rest /= c.w.dims[d + 2];
        const int64_t in = out * c.strides[d] - c.pads[d] + tap * c.dilations[d];
        inside = inside && in >= 0 && in < c.x.dims[d + 2];
        x_at += in * c.x.strides[d + 2];
        y_at += out * c.y.strides[d + 2];
        w_at += tap * c.w.strides[d + 2];
      }
      for (int64_t n = 0; inside && n < c.x.dims[0]; ++n) {
        for (int64_t m = 0; m < c.y.dims[1]; ++m) {
          for (int64_t k = 0; k < c.w.dims[1]; ++k) {
            const int64_t channel = m / m_per_group * c.w.dims[1] + k;
            fn(x_at + n * c.x.strides[0] + channel * c.x.strides[1],
               w_at + m * c.w.strides[0] + k * c.w.strides[1],
               y_at + n * c.y.strides[0] + m * c.y.strides[1]);
          }
        }
      }
    }
  }
}

void compute(const Convolution& c, void* x, void* w, void* y) {
  const Tensor& target = c.side == Side::kForward ? c.y : c.side == Side::kData ? c.x : c.w;
  void* out = c.side == Side::kForward ? y : c.side == Side::kData ? x : w;
  std::vector<double> sums(extent(target) / bytes_of(target.type), 0.0);
  for_each_term(c, [&](int64_t xi, int64_t wi, int64_t yi) {
    if (c.side == Side::kForward) {
      sums[static_cast<size_t>(yi)] += load(x, c.x.type, xi) * load(w, c.w.type, wi);
    } else if (c.side == Side::kData) {
      sums[static_cast<size_t>(xi)] += load(y, c.y.type, yi) * load(w, c.w.type, wi);
    } else {
      sums[static_cast<size_t>(wi)] += load(x, c.x.type, xi) * load(y, c.y.type, yi);
    }
  });
  for (size_t i = 0; i < sums.size(); ++i) {
    store(out, target.type, static_cast<int64_t>(i), sums[i]);
  }
}

// The convolution of a plan or of anything on the way to it.
const Node* operation_of(const Node& n) {
  for (const int name : {static_cast<int>(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG),
                         static_cast<int>(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH),
                         static_cast<int>(CUDNN_ATTR_OPERATIONGRAPH_OPS),
                         static_cast<int>(CUDNN_ATTR_ENGINECFG_ENGINE)}) {
    if (const Node* child = n.child(name)) {
      return operation_of(*child);
    }
  }
  return &n;
}

}  // namespace

#define DOUBLE_ENTRY(code)                     \
  if (cuda_double::enters_failure(__func__)) { \
    return code;                               \
  }

extern "C" {

size_t cudnnGetVersion() {
  return CUDNN_VERSION;
}
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_ALLOC_FAILED ? "CUDNN_STATUS_ALLOC_FAILED"
                                             : "CUDNN_STATUS_OF_DOUBLE";
}
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  DOUBLE_ENTRY(CUDNN_STATUS_ALLOC_FAILED)
  *handle = new cudnnContext{cuda_double::current_device(), nullptr};
  cuda_double::count_alive("cuDNN handles", 1);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) {
  cuda_double::count_alive("cuDNN handles", -1);
  delete handle;
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) {
  DOUBLE_ENTRY(CUDNN_STATUS_BAD_PARAM)
  if (cuda_double::device_of(stream) != handle->device) {
    return CUDNN_STATUS_BAD_PARAM;
  }
  handle->stream = stream;
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  DOUBLE_ENTRY(CUDNN_STATUS_ALLOC_FAILED)
  auto created = std::make_shared<Node>();
  created->type = type;
  *descriptor = new std::shared_ptr<Node>(std::move(created));
  cuda_double::count_alive("cuDNN descriptors", 1);
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  cuda_double::count_alive("cuDNN descriptors", -1);
  delete static_cast<std::shared_ptr<Node>*>(descriptor);
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type,
                                       int64_t count,
                                       const void* elements) {
  DOUBLE_ENTRY(CUDNN_STATUS_BAD_PARAM)
  Node& n = *node(descriptor);
  if (n.finalized || element_size(type) == 0 || count <= 0) {
    return CUDNN_STATUS_BAD_PARAM;
  }
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    const auto child = node(*static_cast<const cudnnBackendDescriptor_t*>(elements));
    if (count != 1 || !child->finalized) {
      return CUDNN_STATUS_BAD_PARAM;
    }
    n.children[name] = child;
    return CUDNN_STATUS_SUCCESS;
  }
  const std::byte* bytes = static_cast<const std::byte*>(elements);
  n.attributes[name] = {type, {bytes, bytes + element_size(type) * static_cast<size_t>(count)}};
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  DOUBLE_ENTRY(CUDNN_STATUS_NOT_SUPPORTED)
  Node& n = *node(descriptor);
  bool good = true;
  switch (n.type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
      good = valid(tensor(n));
      break;
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      good = convolution_of(n).valid;
      break;
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
      good = n.child(CUDNN_ATTR_OPERATIONGRAPH_OPS) != nullptr;
      break;
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
      good = n.child(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) != nullptr;
      break;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
      good = n.child(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) != nullptr;
      break;
    case CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR:
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR:
      break;
    default:
      good = false;
  }
  n.finalized = good;
  return good ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t,
                                       int64_t requested,
                                       int64_t* count,
                                       void* elements) {
  DOUBLE_ENTRY(CUDNN_STATUS_BAD_PARAM)
  Node& n = *node(descriptor);
  if (!n.finalized) {
    return CUDNN_STATUS_BAD_PARAM;
  }
  const bool fallback =
      n.one<cudnnBackendHeurMode_t>(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_HEUR_MODE_A) ==
      CUDNN_HEUR_MODE_FALLBACK;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: {
      // The first engine rounds to TF32 and is not deterministic, the second is plain.
      *count = fallback ? 1 : 2;
      for (int64_t i = 0; i < std::min(requested, *count); ++i) {
        Node& config = *node(static_cast<cudnnBackendDescriptor_t*>(elements)[i]);
        config.finalized = true;
        auto engine = std::make_shared<Node>();
        engine->type = CUDNN_BACKEND_ENGINE_DESCRIPTOR;
        engine->finalized = true;
        engine->children[CUDNN_ATTR_OPERATIONGRAPH_OPS] =
            n.children.at(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH)
                ->children.at(CUDNN_ATTR_OPERATIONGRAPH_OPS);
        if (i == 0 && !fallback) {
          const cudnnBackendNumericalNote_t notes[] = {CUDNN_NUMERICAL_NOTE_TENSOR_CORE,
                                                       CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC};
          const std::byte* bytes = reinterpret_cast<const std::byte*>(notes);
          engine->attributes[CUDNN_ATTR_ENGINE_NUMERICAL_NOTE] = {CUDNN_TYPE_NUMERICAL_NOTE,
                                                                  {bytes, bytes + sizeof(notes)}};
        }
        config.children[CUDNN_ATTR_ENGINECFG_ENGINE] = engine;
      }
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      *count = 1;
      node(*static_cast<cudnnBackendDescriptor_t*>(elements)) =
          n.children.at(CUDNN_ATTR_ENGINECFG_ENGINE);
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE: {
      const auto notes = n.get<cudnnBackendNumericalNote_t>(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE);
      *count = static_cast<int64_t>(notes.size());
      std::memcpy(elements, notes.data(), notes.size() * sizeof(notes[0]));
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      *count = 1;
      *static_cast<int64_t*>(elements) = kEngineWorkspace;
      return CUDNN_STATUS_SUCCESS;
    default:
      return CUDNN_STATUS_NOT_SUPPORTED;
  }
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle,
                                  cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t variant_pack) {
  DOUBLE_ENTRY(CUDNN_STATUS_EXECUTION_FAILED)
  const Node &p = *node(plan), &pack = *node(variant_pack);
  const Convolution c = convolution_of(*operation_of(p));
  const auto uids = pack.get<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = pack.get<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  void* workspace = pack.one<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, nullptr);
  if (!p.finalized || !pack.finalized || !c.valid || uids.size() != pointers.size() ||
      handle->stream == nullptr || !cuda_double::is_device_range(workspace, kEngineWorkspace)) {
    return CUDNN_STATUS_BAD_PARAM;
  }
  void* data[3] = {};
  const Tensor* tensors[] = {&c.x, &c.w, &c.y};
  for (size_t i = 0; i < 3; ++i) {
    for (size_t j = 0; j < uids.size(); ++j) {
      data[i] = uids[j] == tensors[i]->uid ? pointers[j] : data[i];
    }
    if (data[i] == nullptr || !cuda_double::is_device_range(data[i], extent(*tensors[i])) ||
        reinterpret_cast<uintptr_t>(data[i]) % static_cast<uintptr_t>(tensors[i]->alignment) != 0) {
      return CUDNN_STATUS_BAD_PARAM;
    }
  }
  const cudaError_t queued =
      cuda_double::enqueue(handle->stream, [c, workspace, x = data[0], w = data[1], y = data[2]] {
        compute(c, x, w, y);
        std::memset(workspace, 0xff, kEngineWorkspace);  // whoever keeps something there loses it
      });
  return queued == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
