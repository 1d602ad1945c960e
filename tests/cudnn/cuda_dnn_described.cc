#include "tests/cudnn/cuda_dnn_described.h"

#include <cudnn.h>
#include <dlfcn.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "graph/base/error.h"

namespace {

void* library() {
  static void* const handle = dlopen(TRAINRT_CUDNN_LIBRARY, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw std::runtime_error(dlerror());
  }
  return handle;
}

// The library's function of the same name and type.
template <typename Fn>
Fn* real(Fn*, const char* name) {
  Fn* const found = reinterpret_cast<Fn*>(dlsym(library(), name));
  if (found == nullptr) {
    throw std::runtime_error(dlerror());
  }
  return found;
}
#define REAL(name) real(&name, #name)

struct State {
  cudnnBackendDescriptor_t gpu = nullptr;
  std::set<cudnnBackendDescriptor_t> heuristics;  // that want the description, too
  int64_t runs = 0;
  std::string refusals;
  std::vector<cuda_dnn_described::Engine> proposed, run;
};

State& state() {
  static State state;
  return state;
}

cudnnStatus_t noted(cudnnStatus_t status, const char* name) {
  if (status != CUDNN_STATUS_SUCCESS) {
    char reasons[4096] = {};
    REAL(cudnnGetLastErrorString)(reasons, sizeof(reasons));
    state().refusals +=
        trainrt::concat(name, ": ", REAL(cudnnGetErrorString)(status), ": ", reasons, "\n");
  }
  return status;
}

cudnnStatus_t set_gpu(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name) {
  return noted(REAL(cudnnBackendSetAttribute)(
                   descriptor, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &state().gpu),
               "cudnnBackendSetAttribute");
}

class Made {
 public:
  explicit Made(cudnnBackendDescriptorType_t type) {
    noted(REAL(cudnnBackendCreateDescriptor)(type, &handle_), "cudnnBackendCreateDescriptor");
  }
  ~Made() { REAL(cudnnBackendDestroyDescriptor)(handle_); }
  Made(const Made&) = delete;
  Made& operator=(const Made&) = delete;
  cudnnBackendDescriptor_t get() const { return handle_; }

 private:
  cudnnBackendDescriptor_t handle_ = nullptr;
};

// How many of an attribute's elements there are; they are written to `to`.
int64_t read(cudnnBackendDescriptor_t from,
             cudnnBackendAttributeName_t name,
             cudnnBackendAttributeType_t type,
             int64_t room,
             void* to) {
  int64_t count = 0;
  noted(REAL(cudnnBackendGetAttribute)(from, name, type, room, &count, to),
        "cudnnBackendGetAttribute");
  return count;
}

cuda_dnn_described::Engine engine_of(cudnnBackendDescriptor_t config) {
  const Made engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
  cudnnBackendDescriptor_t handle = engine.get();
  read(config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &handle);
  cudnnBackendNumericalNote_t notes[CUDNN_NUMERICAL_NOTE_TYPE_COUNT] = {};
  const int64_t count = read(engine.get(),
                             CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                             CUDNN_TYPE_NUMERICAL_NOTE,
                             CUDNN_NUMERICAL_NOTE_TYPE_COUNT,
                             notes);
  cuda_dnn_described::Engine found;
  found.notes.insert(notes, notes + count);
  read(config, CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &found.workspace);
  return found;
}

void list_proposals(cudnnBackendDescriptor_t heuristic, int64_t announced) {
  std::vector<std::unique_ptr<Made>> configs;
  std::vector<cudnnBackendDescriptor_t> handles;
  for (int64_t i = 0; i < announced; ++i) {
    configs.push_back(std::make_unique<Made>(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
    handles.push_back(configs.back()->get());
  }
  const int64_t count = read(heuristic,
                             CUDNN_ATTR_ENGINEHEUR_RESULTS,
                             CUDNN_TYPE_BACKEND_DESCRIPTOR,
                             announced,
                             handles.data());
  state().proposed.clear();
  for (int64_t i = 0; i < count; ++i) {
    state().proposed.push_back(engine_of(handles[static_cast<size_t>(i)]));
  }
}

}  // namespace

namespace cuda_dnn_described {

const std::vector<Engine>& proposed() {
  return state().proposed;
}
const std::vector<Engine>& run() {
  return state().run;
}

void describe(const Gpu& gpu) {
  const std::string text = trainrt::concat(
      R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],)",
      R"("regsPerBlock":65536,"warpSize":32,"maxSharedMemoryPerBlock":49152,)",
      R"("reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":32,)",
      R"("maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,)",
      R"("supportCoopLaunch":1,"smClockRateKHz":1980000,"memClockRateKHz":2619000,)",
      R"("l2CacheSize":52428800,"cudaDeviceId":0,"driverVer":13000,"totalGlobalMem":85899345920,)",
      R"("multiProcessorCount":)",
      gpu.multiprocessors,
      R"(,"maxSharedMemoryPerBlockOptin":)",
      gpu.shared_bytes,
      R"(,"deviceVer":)",
      gpu.major * 100,
      R"(,"deviceName":")",
      gpu.name,
      R"("})");
  State& s = state();
  if (s.gpu != nullptr) {
    REAL(cudnnBackendDestroyDescriptor)(s.gpu);
  }
  s = {};
  TRAINRT_CHECK(REAL(cudnnBackendCreateDescriptor)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, &s.gpu) ==
                        CUDNN_STATUS_SUCCESS &&
                    REAL(cudnnBackendSetAttribute)(s.gpu,
                                                   CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                                                   CUDNN_TYPE_CHAR,
                                                   static_cast<int64_t>(text.size()),
                                                   text.data()) == CUDNN_STATUS_SUCCESS &&
                    noted(REAL(cudnnBackendFinalize)(s.gpu), "describe") == CUDNN_STATUS_SUCCESS,
                s.refusals);
}

int64_t num_runs() {
  return state().runs;
}
std::string refusals() {
  return state().refusals;
}

}  // namespace cuda_dnn_described

extern "C" {

size_t cudnnGetVersion() {
  return REAL(cudnnGetVersion)();
}
const char* cudnnGetErrorString(cudnnStatus_t status) {
  return REAL(cudnnGetErrorString)(status);
}
void cudnnGetLastErrorString(char* message, size_t size) {
  REAL(cudnnGetLastErrorString)(message, size);
}
cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  *handle = reinterpret_cast<cudnnHandle_t>(&state());
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t) {
  return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t cudnnSetStream(cudnnHandle_t, cudaStream_t) {
  return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type,
                                           cudnnBackendDescriptor_t* descriptor) {
  const cudnnStatus_t status = REAL(cudnnBackendCreateDescriptor)(type, descriptor);
  if (type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR) {
    state().heuristics.insert(*descriptor);
  }
  return noted(status, __func__);
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
  state().heuristics.erase(descriptor);
  return REAL(cudnnBackendDestroyDescriptor)(descriptor);
}
cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type,
                                       int64_t count,
                                       const void* elements) {
  if (name == CUDNN_ATTR_OPERATIONGRAPH_HANDLE) {
    return CUDNN_STATUS_SUCCESS;
  }
  if (name == CUDNN_ATTR_EXECUTION_PLAN_HANDLE) {
    return set_gpu(descriptor, CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
  }
  return noted(REAL(cudnnBackendSetAttribute)(descriptor, name, type, count, elements), __func__);
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor) {
  if (state().heuristics.count(descriptor) > 0) {
    set_gpu(descriptor, CUDNN_ATTR_ENGINEHEUR_DEVICEPROP);
  }
  return noted(REAL(cudnnBackendFinalize)(descriptor), __func__);
}
// Of the engines that are proposed all are listed, and the first two alone given: kernels are
// compiled for each that a plan is made of.
cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor,
                                       cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type,
                                       int64_t requested,
                                       int64_t* count,
                                       void* elements) {
  const cudnnStatus_t status =
      REAL(cudnnBackendGetAttribute)(descriptor, name, type, requested, count, elements);
  if (name == CUDNN_ATTR_ENGINEHEUR_RESULTS) {
    if (requested == 0 && *count > 0) {
      list_proposals(descriptor, *count);
    }
    *count = std::min<int64_t>(*count, 2);
  }
  return noted(status, __func__);
}
cudnnStatus_t cudnnBackendExecute(cudnnHandle_t,
                                  cudnnBackendDescriptor_t plan,
                                  cudnnBackendDescriptor_t) {
  ++state().runs;
  const Made config(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  cudnnBackendDescriptor_t handle = config.get();
  read(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &handle);
  state().run.push_back(engine_of(config.get()));
  return CUDNN_STATUS_SUCCESS;
}

}  // extern "C"
