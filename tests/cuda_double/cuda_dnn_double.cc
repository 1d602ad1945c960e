// The entry points of the double's cuDNN: the graph API as a store of attributes. What graphs are
// offered and what they compute is in cuda_dnn_graph.
#include <cudnn.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "tests/cuda_double/cuda_dnn_graph.h"
#include "tests/cuda_double/cuda_double.h"

struct cudnnContext {
  int device = 0;
  cudaStream_t stream = nullptr;
};

namespace {

using cuda_double::dnn::Graph;
using cuda_double::dnn::Node;
using cuda_double::dnn::Tensor;

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
    case CUDNN_TYPE_POINTWISE_MODE:
    case CUDNN_TYPE_REDUCTION_OPERATOR_TYPE:
    case CUDNN_TYPE_HEUR_MODE:
    case CUDNN_TYPE_NUMERICAL_NOTE:
      return 4;
    case CUDNN_TYPE_BOOLEAN:
      return 1;
    default:
      return 0;
  }
}

std::shared_ptr<Node>& node(cudnnBackendDescriptor_t descriptor) {
  return *static_cast<std::shared_ptr<Node>*>(descriptor);
}

// What the double's engines want as workspace, and those that want more than there is.
constexpr int64_t kEngineWorkspace = 256, kTooMuchWorkspace = int64_t{1} << 40;

using cuda_double::Fault;
using cuda_double::fault_of;

// Of the kind `type`: a plan, or anything on the way to it.
const Node* part_of(const Node& n, cudnnBackendDescriptorType_t type) {
  if (n.type == type) {
    return &n;
  }
  for (const int name : {static_cast<int>(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG),
                         static_cast<int>(CUDNN_ATTR_ENGINECFG_ENGINE),
                         static_cast<int>(CUDNN_ATTR_ENGINE_OPERATION_GRAPH)}) {
    if (const Node* child = n.child(name)) {
      return part_of(*child, type);
    }
  }
  return nullptr;
}

Fault fault_of_plan(const Node& plan) {
  const Node* const engine = part_of(plan, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  return engine == nullptr ? Fault::kNone : fault_of(engine->engine);
}

std::shared_ptr<Node> engine_of(const char* name,
                                const std::shared_ptr<Node>& graph,
                                std::vector<cudnnBackendNumericalNote_t> notes) {
  auto engine = std::make_shared<Node>();
  engine->type = CUDNN_BACKEND_ENGINE_DESCRIPTOR;
  engine->engine = name;
  engine->finalized = true;
  engine->children[CUDNN_ATTR_ENGINE_OPERATION_GRAPH] = {graph};
  const std::byte* bytes = reinterpret_cast<const std::byte*>(notes.data());
  engine->attributes[CUDNN_ATTR_ENGINE_NUMERICAL_NOTE] = {
      CUDNN_TYPE_NUMERICAL_NOTE, {bytes, bytes + notes.size() * sizeof(notes[0])}};
  return engine;
}

// The first engine rounds to TF32, is not deterministic and may add in 16 bits, the second is
// plain; where gradients are added in any order, both are not deterministic.
std::vector<std::shared_ptr<Node>> engines(const Node& heuristic) {
  const std::shared_ptr<Node>& graph =
      heuristic.children.at(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH).at(0);
  std::vector<cudnnBackendNumericalNote_t> fast = {CUDNN_NUMERICAL_NOTE_TENSOR_CORE,
                                                   CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC},
                                           plain;
  const Graph operations = *cuda_double::dnn::graph_of(*graph);
  if (operations.has_narrow()) {
    fast.push_back(CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION);
  }
  if (operations.adds_in_any_order) {
    plain.push_back(CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC);
  }
  if (heuristic.one<cudnnBackendHeurMode_t>(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_HEUR_MODE_A) ==
      CUDNN_HEUR_MODE_FALLBACK) {
    return {engine_of("F0", graph, plain)};
  }
  return {engine_of("A0", graph, fast), engine_of("A1", graph, plain)};
}

cudnnStatus_t misused(const char* call) {
  cuda_double::note_misuse(call);
  return CUDNN_STATUS_BAD_PARAM;
}

bool is_known_operation(const Node& n) {
  return cuda_double::dnn::operation_of(n).has_value();
}

}  // namespace

#define DOUBLE_ENTRY(code)                     \
  if (cuda_double::enters_failure(__func__)) { \
    return code;                               \
  }

extern "C" {

size_t cudnnGetVersion() {
  const size_t version = cuda_double::options().cudnn_version;
  return version == 0 ? CUDNN_VERSION : version;
}
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return status == CUDNN_STATUS_ALLOC_FAILED ? "CUDNN_STATUS_ALLOC_FAILED"
                                             : "CUDNN_STATUS_OF_DOUBLE";
}
void cudnnGetLastErrorString(char* message, size_t size) {
  std::snprintf(message, size, "the double's reason");
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
    return misused(__func__);
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
    return misused(__func__);
  }
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    const auto* handles = static_cast<const cudnnBackendDescriptor_t*>(elements);
    std::vector<std::shared_ptr<Node>> children;
    for (int64_t i = 0; i < count; ++i) {
      children.push_back(node(handles[i]));
      if (!children.back()->finalized) {
        return misused(__func__);
      }
    }
    n.children[name] = std::move(children);
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
      good = is_valid(cuda_double::dnn::tensor_of(n));
      break;
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR:
      good = is_known_operation(n);
      break;
    case CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR:
      if (fault_of("graph") == Fault::kRefuses) {
        return CUDNN_STATUS_NOT_SUPPORTED;
      }
      good = cuda_double::dnn::graph_of(n).has_value();
      break;
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
      good = n.child(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH) != nullptr;
      break;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
      if (fault_of_plan(n) == Fault::kRefuses) {
        return CUDNN_STATUS_NOT_SUPPORTED;
      }
      good = n.child(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG) != nullptr;
      cuda_double::count_plan();
      break;
    case CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR:
    case CUDNN_BACKEND_POINTWISE_DESCRIPTOR:
    case CUDNN_BACKEND_MATMUL_DESCRIPTOR:
    case CUDNN_BACKEND_REDUCTION_DESCRIPTOR:
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR:
      break;
    default:
      good = false;
  }
  n.finalized = good;
  return good ? CUDNN_STATUS_SUCCESS : misused(__func__);
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
    return misused(__func__);
  }
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: {
      const std::vector<std::shared_ptr<Node>> found = engines(n);
      // The real library announces what it then leaves out.
      *count = static_cast<int64_t>(found.size()) + (requested == 0 ? 1 : 0);
      for (size_t i = 0; i < found.size() && static_cast<int64_t>(i) < requested; ++i) {
        Node& config = *node(static_cast<cudnnBackendDescriptor_t*>(elements)[i]);
        config.finalized = true;
        config.children[CUDNN_ATTR_ENGINECFG_ENGINE] = {found[i]};
      }
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_ENGINECFG_ENGINE:
      *count = 1;
      node(*static_cast<cudnnBackendDescriptor_t*>(elements)) =
          n.children.at(CUDNN_ATTR_ENGINECFG_ENGINE).at(0);
      return CUDNN_STATUS_SUCCESS;
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE: {
      const auto notes = n.get<cudnnBackendNumericalNote_t>(CUDNN_ATTR_ENGINE_NUMERICAL_NOTE);
      *count = static_cast<int64_t>(notes.size());
      std::memcpy(elements, notes.data(), notes.size() * sizeof(notes[0]));
      return CUDNN_STATUS_SUCCESS;
    }
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      *count = 1;
      *static_cast<int64_t*>(elements) =
          fault_of_plan(n) == Fault::kWantsMore ? kTooMuchWorkspace : kEngineWorkspace;
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
  const Node* operations = part_of(p, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  const auto uids = pack.get<int64_t>(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
  const auto pointers = pack.get<void*>(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
  void* workspace = pack.one<void*>(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, nullptr);
  if (!p.finalized || !pack.finalized || operations == nullptr || uids.size() != pointers.size() ||
      handle->stream == nullptr || !cuda_double::is_device_range(workspace, kEngineWorkspace) ||
      reinterpret_cast<uintptr_t>(workspace) % 256 != 0) {
    return misused(__func__);
  }
  if (fault_of_plan(p) == Fault::kFails) {
    return CUDNN_STATUS_EXECUTION_FAILED;
  }
  const Graph graph = *cuda_double::dnn::graph_of(*operations);
  const std::string& engine = part_of(p, CUDNN_BACKEND_ENGINE_DESCRIPTOR)->engine;
  const std::string kernel = "cuDNN " + engine + " " + graph.operations.front().name;
  if (cuda_double::load_kernel(handle->stream, kernel) != cudaSuccess) {
    return CUDNN_STATUS_EXECUTION_FAILED;
  }
  std::map<int64_t, void*> data;
  std::map<int64_t, double> scalars;  // read now, as the real library does
  for (const Tensor& tensor : graph.in_memory()) {
    const auto at = std::find(uids.begin(), uids.end(), tensor.uid);
    void* const pointer =
        at == uids.end() ? nullptr : pointers[static_cast<size_t>(at - uids.begin())];
    if (pointer == nullptr ||
        reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(tensor.alignment) != 0) {
      return misused(__func__);
    }
    if (tensor.by_value) {
      scalars[tensor.uid] = load(tensor, pointer).at(0);
    } else if (cuda_double::is_device_range(pointer, tensor.extent())) {
      data[tensor.uid] = pointer;
    } else {
      return misused(__func__);
    }
  }
  const cudaError_t queued =
      cuda_double::enqueue(handle->stream, [graph, workspace, data, scalars, engine] {
        graph.run(data, scalars, engine == "A0");
        std::memset(workspace, 0xff, kEngineWorkspace);  // whoever keeps something there loses it
      });
  return queued == cudaSuccess ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
