// See ops/conv_cudnn.cuh.
//
// The engines that cuDNN's heuristics propose, in their order, are tried out at the first run, and
// the fastest is noted in the device's AlgorithmCache. Where equal bits are wanted in every run the
// first is taken: what is measured differs between runs.
#include <cudnn.h>

#include <algorithm>
#include <vector>

#include "graph/base/cuda_check.h"
#include "graph/base/log.h"
#include "graph/cuda_handle.h"
#include "ops/conv_cudnn.cuh"
#include "ops/convolution.h"
#include "ops/strided_copy.cuh"

namespace trainrt::cudnn {

namespace {

constexpr int64_t kAlignment = 64;  // what the memory plan aligns tensors to
constexpr size_t kMostCandidates = 6;
constexpr int kMeasuredRuns = 3;
enum Uid : int64_t { kX = 1, kW = 2, kY = 3 };

cudnnDataType_t data_type(DType dtype) {
  return dtype == DType::kFloat16    ? CUDNN_DATA_HALF
         : dtype == DType::kBFloat16 ? CUDNN_DATA_BFLOAT16
                                     : CUDNN_DATA_FLOAT;
}

class Descriptor {
 public:
  explicit Descriptor(cudnnBackendDescriptorType_t type) {
    TRAINRT_CUDA_CHECK(cudnnBackendCreateDescriptor(type, &handle_));
  }
  ~Descriptor() {
    if (handle_ != nullptr) {
      static_cast<void>(cudnnBackendDestroyDescriptor(handle_));
    }
  }
  Descriptor(Descriptor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  Descriptor& operator=(Descriptor&&) = delete;

  cudnnBackendDescriptor_t get() const { return handle_; }

  template <typename T>
  void set(cudnnBackendAttributeName_t name,
           cudnnBackendAttributeType_t type,
           const std::vector<T>& values) {
    TRAINRT_CUDA_CHECK(cudnnBackendSetAttribute(
        handle_, name, type, static_cast<int64_t>(values.size()), values.data()));
  }
  void set(cudnnBackendAttributeName_t name, const Descriptor& value) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, std::vector{value.handle_});
  }
  void finalize() { TRAINRT_CUDA_CHECK(cudnnBackendFinalize(handle_)); }

 private:
  cudnnBackendDescriptor_t handle_ = nullptr;
};

struct TensorLayout {
  Shape dims, strides;  // n, c, spatial
};

// cuDNN has no convolution of one spatial dim: a second one of size 1 comes before it.
Shape with_plane(Shape spatial, int64_t value) {
  if (spatial.size() == 1) {
    spatial.insert(spatial.begin(), value);
  }
  return spatial;
}

TensorLayout layout_of(int64_t n, int64_t c, const Shape& spatial, bool channels_last) {
  TensorLayout layout;
  layout.dims = {n, c};
  layout.dims.insert(layout.dims.end(), spatial.begin(), spatial.end());
  if (!channels_last) {
    layout.strides = row_major_strides(layout.dims);
    return layout;
  }
  layout.strides.resize(layout.dims.size());
  layout.strides[1] = 1;
  int64_t stride = c;
  for (size_t d = layout.dims.size(); d-- > 2;) {
    layout.strides[d] = stride;
    stride *= layout.dims[d];
  }
  layout.strides[0] = stride;
  return layout;
}

Descriptor tensor(const TensorLayout& layout, DType dtype, Uid uid) {
  Descriptor d(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  d.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, std::vector{data_type(dtype)});
  d.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, layout.dims);
  d.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, layout.strides);
  d.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, std::vector<int64_t>{uid});
  d.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, std::vector<int64_t>{kAlignment});
  d.finalize();
  return d;
}

struct OperationKind {
  cudnnBackendDescriptorType_t type;
  cudnnBackendAttributeName_t x, w, y, convolution, alpha, beta;
};

OperationKind kind_of(const std::string& op_type) {
  if (op_type == "Conv") {
    return {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
            CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
            CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
            CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
            CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
            CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
            CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA};
  }
  if (op_type == "ConvInputGrad") {
    return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
            CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA};
  }
  return {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
          CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
}

int64_t round_up(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

struct ConvolutionPlan::Impl {
  std::string op_type, node_name;
  DType dtype;
  Convolution conv;
  Shape kernel, strides, dilations, pads;
  TensorLayout x, w, y, own_w;  // own_w: as the graph holds the weight
  int64_t copy_bytes = 0;       // of the weight in cuDNN's order, at the workspace's start
  bool asked = false;
  std::unique_ptr<Descriptor> plan;  // null: no engine

  Impl(const OpContext& op, const DeviceSpec&)
      : op_type(op.node().op_type),
        node_name(op.node().name),
        dtype(op.input_dtype(0)),
        conv(convolution_of(op)) {
    const Window& window = conv.window;
    const bool last = window.channels_last;
    kernel = with_plane(window.kernel, 1);
    strides = with_plane(window.strides, 1);
    dilations = with_plane(window.dilations, 1);
    pads = with_plane(window.pads_begin, 0);
    x = layout_of(conv.n, conv.c, with_plane(conv.input, 1), last);
    y = layout_of(conv.n, conv.m, with_plane(conv.output, 1), last);
    w = layout_of(conv.m, conv.c / conv.group, kernel, last);
    own_w = layout_of(conv.m, conv.c / conv.group, kernel, false);
    if (last) {
      copy_bytes = round_up(num_elements(w.dims) * dtype_bytes(dtype));
    }
  }

  // Which engine, and what it may not do.
  bool allowed(const Descriptor& config, const CudaContext& context) const {
    const Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    cudnnBackendDescriptor_t handle = engine.get();
    int64_t count = 0;
    TRAINRT_CUDA_CHECK(cudnnBackendGetAttribute(config.get(),
                                                CUDNN_ATTR_ENGINECFG_ENGINE,
                                                CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                                1,
                                                &count,
                                                &handle));
    std::vector<cudnnBackendNumericalNote_t> notes(CUDNN_NUMERICAL_NOTE_TYPE_COUNT);
    TRAINRT_CUDA_CHECK(cudnnBackendGetAttribute(engine.get(),
                                                CUDNN_ATTR_ENGINE_NUMERICAL_NOTE,
                                                CUDNN_TYPE_NUMERICAL_NOTE,
                                                CUDNN_NUMERICAL_NOTE_TYPE_COUNT,
                                                &count,
                                                notes.data()));
    for (int64_t i = 0; i < count; ++i) {
      const cudnnBackendNumericalNote_t note = notes[static_cast<size_t>(i)];
      // Tensor cores take float32 as TF32.
      const bool rounds = note == CUDNN_NUMERICAL_NOTE_TENSOR_CORE ||
                          note == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS;
      if ((rounds && dtype == DType::kFloat32 && !context.tf32()) ||
          (note == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC && context.deterministic())) {
        return false;
      }
    }
    return true;
  }

  // The plan of an engine, if it works on this device and within the workspace.
  std::unique_ptr<Descriptor> try_plan(CudaContext& context,
                                       const Descriptor& config,
                                       int64_t room) const {
    auto candidate = std::make_unique<Descriptor>(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    candidate->set(
        CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, std::vector{context.cudnn()});
    candidate->set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
    const cudnnStatus_t status = cudnnBackendFinalize(candidate->get());
    if (status == CUDNN_STATUS_ALLOC_FAILED) {
      TRAINRT_CUDA_CHECK(status);
    }
    if (status != CUDNN_STATUS_SUCCESS) {
      return nullptr;  // an engine may refuse what the heuristic proposed: the next one is asked
    }
    int64_t bytes = 0, count = 0;
    TRAINRT_CUDA_CHECK(cudnnBackendGetAttribute(candidate->get(),
                                                CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                                CUDNN_TYPE_INT64,
                                                1,
                                                &count,
                                                &bytes));
    return bytes <= room ? std::move(candidate) : nullptr;
  }

  Descriptor operation_graph(CudaContext& context) const {
    Descriptor convolution(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    convolution.set(
        CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, std::vector{CUDNN_DATA_FLOAT});
    convolution.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE,
                    CUDNN_TYPE_CONVOLUTION_MODE,
                    std::vector{CUDNN_CROSS_CORRELATION});
    convolution.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS,
                    CUDNN_TYPE_INT64,
                    std::vector<int64_t>{static_cast<int64_t>(kernel.size())});
    convolution.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, dilations);
    convolution.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, strides);
    convolution.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, pads);
    convolution.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, pads);
    convolution.finalize();
    const OperationKind kind = kind_of(op_type);
    const Descriptor tx = tensor(x, dtype, kX), tw = tensor(w, dtype, kW),
                     ty = tensor(y, dtype, kY);
    Descriptor operation(kind.type);
    operation.set(kind.convolution, convolution);
    operation.set(kind.x, tx);
    operation.set(kind.w, tw);
    operation.set(kind.y, ty);
    operation.set(kind.alpha, CUDNN_TYPE_FLOAT, std::vector{1.0f});
    operation.set(kind.beta, CUDNN_TYPE_FLOAT, std::vector{0.0f});
    operation.finalize();
    Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, std::vector{context.cudnn()});
    graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operation);
    graph.finalize();
    return graph;
  }

  struct Candidate {
    std::string name;  // mode and place of the proposal
    std::unique_ptr<Descriptor> plan;
  };

  std::vector<Candidate> candidates(CudaContext& context, int64_t room) const {
    std::vector<Candidate> found;
    const Descriptor graph = operation_graph(context);
    for (const cudnnBackendHeurMode_t mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
      Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
      heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph);
      heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, std::vector{mode});
      heuristic.finalize();
      int64_t count = 0;
      TRAINRT_CUDA_CHECK(cudnnBackendGetAttribute(heuristic.get(),
                                                  CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                                  CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                                  0,
                                                  &count,
                                                  nullptr));
      std::vector<Descriptor> configs;
      std::vector<cudnnBackendDescriptor_t> handles;
      for (int64_t i = 0; i < count; ++i) {
        configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
        handles.push_back(configs.back().get());
      }
      if (count > 0) {
        TRAINRT_CUDA_CHECK(cudnnBackendGetAttribute(heuristic.get(),
                                                    CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                                    CUDNN_TYPE_BACKEND_DESCRIPTOR,
                                                    count,
                                                    &count,
                                                    handles.data()));
      }
      for (int64_t i = 0; i < count && found.size() < kMostCandidates; ++i) {
        const Descriptor& config = configs[static_cast<size_t>(i)];
        std::unique_ptr<Descriptor> made =
            allowed(config, context) ? try_plan(context, config, room) : nullptr;
        if (made != nullptr) {
          found.push_back({concat(mode == CUDNN_HEUR_MODE_A ? "A" : "F", i), std::move(made)});
        }
      }
      if (!found.empty()) {
        break;
      }
    }
    return found;
  }

  // All that the choice depends on.
  std::string key(const CudaContext& context, int64_t room) const {
    return concat(context.device_name(),
                  "|cuDNN ",
                  cudnnGetVersion(),
                  "|",
                  op_type,
                  " ",
                  dtype_name(dtype),
                  " x",
                  shape_string(x.dims),
                  shape_string(x.strides),
                  " w",
                  shape_string(w.dims),
                  " y",
                  shape_string(y.dims),
                  " strides",
                  shape_string(strides),
                  " dilations",
                  shape_string(dilations),
                  " pads",
                  shape_string(pads),
                  context.tf32() ? " tf32 " : " ",
                  room);
  }

  static void execute(CudaContext& context, const Descriptor& plan, const Descriptor& pack) {
    TRAINRT_CUDA_CHECK(cudnnBackendExecute(context.cudnn(), plan.get(), pack.get()));
  }

  static float milliseconds(CudaContext& context, const Descriptor& plan, const Descriptor& pack) {
    cuda::Event begin, end;
    TRAINRT_CUDA_CHECK(cudaEventCreateWithFlags(begin.put(), cudaEventDefault));
    TRAINRT_CUDA_CHECK(cudaEventCreateWithFlags(end.put(), cudaEventDefault));
    execute(context, plan, pack);  // once for what the first run makes ready
    TRAINRT_CUDA_CHECK(cudaEventRecord(begin.get(), context.cuda_stream()));
    for (int i = 0; i < kMeasuredRuns; ++i) {
      execute(context, plan, pack);
    }
    TRAINRT_CUDA_CHECK(cudaEventRecord(end.get(), context.cuda_stream()));
    TRAINRT_CUDA_CHECK(cudaEventSynchronize(end.get()));
    float elapsed = 0;
    TRAINRT_CUDA_CHECK(cudaEventElapsedTime(&elapsed, begin.get(), end.get()));
    return elapsed;
  }

  // `pack` says where the tensors lie; the result may be written any number of times.
  void choose(CudaContext& context, int64_t room, const Descriptor& pack) {
    std::vector<Candidate> all = candidates(context, room);
    asked = true;
    if (all.empty()) {
      log_warning("node '",
                  node_name,
                  "' (",
                  op_type,
                  "): cuDNN has no engine for it within ",
                  room,
                  " bytes of workspace; a slower kernel runs");
      return;
    }
    size_t best = 0;
    if (all.size() > 1 && !context.deterministic()) {
      const std::string problem = key(context, room);
      const std::optional<std::string> known = context.algorithms().find(problem);
      const auto at = std::find_if(all.begin(), all.end(), [&](const Candidate& candidate) {
        return candidate.name == known;
      });
      if (at != all.end()) {
        best = static_cast<size_t>(at - all.begin());
      } else {
        std::vector<float> times;
        for (const Candidate& candidate : all) {
          times.push_back(milliseconds(context, *candidate.plan, pack));
        }
        best = static_cast<size_t>(std::min_element(times.begin(), times.end()) - times.begin());
        context.algorithms().keep(problem, all[best].name);
      }
    }
    plan = std::move(all[best].plan);
  }
};

bool takes(const OpContext& op) {
  const Convolution conv = convolution_of(op);
  const Window& w = conv.window;
  const DType dtype = op.input_dtype(0);
  return (dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16) &&
         w.ndim() >= 1 && w.ndim() <= 3 && w.pads_begin == w.pads_end && op.num_elements(0) > 0 &&
         op.num_elements(1) > 0 && num_elements(op.output_shape(0)) > 0;
}

ConvolutionPlan::ConvolutionPlan(const OpContext& op, const DeviceSpec& spec)
    : impl_(std::make_unique<Impl>(op, spec)) {}

ConvolutionPlan::~ConvolutionPlan() = default;

bool ConvolutionPlan::run(KernelContext& context) {
  Impl& p = *impl_;
  CudaContext& cuda = cuda_context(context);
  std::byte* room = context.workspace().data();
  const int64_t room_bytes = static_cast<int64_t>(context.workspace().size()) - p.copy_bytes;
  TRAINRT_CHECK(room_bytes >= 0, p.node_name, ": the weight's copy needs ", p.copy_bytes);
  if (p.asked && p.plan == nullptr) {
    return false;
  }
  const bool copies = p.copy_bytes > 0, weight_grad = p.op_type == "ConvWeightGrad";
  void* first = context.raw_input(0);
  void* second = context.raw_input(1);
  void* out = context.raw_output(0);
  void* own_w = weight_grad ? out : second;
  void* w = copies ? room : own_w;
  if (copies && !weight_grad) {
    copy_views(context, p.dtype, p.w.dims, {w, p.w.strides}, {own_w, p.own_w.strides});
  }
  void* x = p.op_type == "ConvInputGrad" ? out : first;
  void* y = p.op_type == "Conv" ? out : p.op_type == "ConvInputGrad" ? first : second;
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, std::vector<int64_t>{kX, kW, kY});
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, std::vector<void*>{x, w, y});
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
           CUDNN_TYPE_VOID_PTR,
           std::vector<void*>{room + p.copy_bytes});
  pack.finalize();
  if (!p.asked) {
    p.choose(cuda, room_bytes, pack);
  }
  if (p.plan == nullptr) {
    return false;
  }
  Impl::execute(cuda, *p.plan, pack);
  if (copies && weight_grad) {
    copy_views(context, p.dtype, p.w.dims, {own_w, p.own_w.strides}, {w, p.w.strides});
  }
  return true;
}

}  // namespace trainrt::cudnn
