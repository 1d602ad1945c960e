// See ops/cudnn_graph.cuh.
//
// Heuristic mode A ranks the engines of most graphs by their expected speed; mode FALLBACK names
// those that are meant to work wherever anything does, and is asked where none of A's is left. What
// a heuristic proposes may still be refused when its plan is finalized, and a plan when it runs.
#include <algorithm>
#include <limits>

#include "graph/cuda_handle.h"
#include "ops/cudnn_graph.cuh"

namespace trainrt::cudnn {

namespace {

constexpr size_t kMostCandidates = 6;
constexpr size_t kWorkspaceAlignment = 256;  // what memory of its own would have
constexpr int kMeasuredRuns = 3;

std::span<std::byte> aligned(std::span<std::byte> workspace) {
  const size_t behind = reinterpret_cast<uintptr_t>(workspace.data()) % kWorkspaceAlignment;
  return workspace.subspan(
      std::min(workspace.size(), (kWorkspaceAlignment - behind) % kWorkspaceAlignment));
}

// Does `fn` of one attempt. False when cuDNN refuses, which is then among the refusals. Throws
// where the device has failed, as it will whatever is asked next.
template <typename Fn>
bool taken(CudaContext& context,
           const std::string& attempt,
           std::vector<std::string>& refusals,
           Fn&& fn) {
  try {
    fn();
    return true;
  } catch (const Error& error) {
    // Memory is what this attempt may want more of than the next one.
    if (error.code() != ErrorCode::kDevice && error.code() != ErrorCode::kOutOfMemory) {
      throw;
    }
    char reason[512] = {};
    cudnnGetLastErrorString(reason, sizeof(reason));
    refusals.push_back(concat(attempt, ": ", error.message(), reason[0] == 0 ? "" : ": ", reason));
    const cudaError_t state = cudaStreamQuery(context.cuda_stream());
    static_cast<void>(cudaGetLastError());  // that the stream has work to do is no error
    if (state != cudaSuccess && state != cudaErrorNotReady) {
      cuda::fail(cuda::failure_of(state), "cudaStreamQuery");
    }
    return false;
  }
}

// The names under which a pointwise operation knows its tensors.
struct PointwiseNames {
  cudnnBackendAttributeName_t first, second, y;
};

PointwiseNames pointwise_names(cudnnPointwiseMode_t mode) {
  const bool backward = mode >= CUDNN_POINTWISE_RELU_BWD && mode < CUDNN_POINTWISE_CMP_EQ;
  if (backward) {  // x is what went forward, b the gradient that comes back
    return {CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
            CUDNN_ATTR_OPERATION_POINTWISE_DYDESC,
            CUDNN_ATTR_OPERATION_POINTWISE_DXDESC};
  }
  return {CUDNN_ATTR_OPERATION_POINTWISE_XDESC,
          CUDNN_ATTR_OPERATION_POINTWISE_BDESC,
          CUDNN_ATTR_OPERATION_POINTWISE_YDESC};
}

}  // namespace

cudnnDataType_t data_type(DType dtype) {
  return dtype == DType::kFloat16    ? CUDNN_DATA_HALF
         : dtype == DType::kBFloat16 ? CUDNN_DATA_BFLOAT16
                                     : CUDNN_DATA_FLOAT;
}

int64_t Graph::add_tensor(
    const Shape& dims, const Shape& strides, cudnnDataType_t type, Place place, int64_t alignment) {
  const int64_t id = static_cast<int64_t>(tensors_.size()) + 1;
  Descriptor d(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
  d.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, std::vector{type});
  d.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims);
  d.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, strides);
  d.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, std::vector<int64_t>{id});
  d.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, std::vector{alignment});
  if (place == Place::kInner) {
    d.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, true);
  }
  if (place == Place::kHost) {
    d.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, true);
  }
  d.finalize();
  tensors_.push_back(std::move(d));
  return id;
}

int64_t Graph::tensor(const Shape& dims,
                      const Shape& strides,
                      cudnnDataType_t type,
                      int64_t alignment) {
  return add_tensor(dims, strides, type, Place::kMemory, alignment);
}

int64_t Graph::inner(const Shape& dims, cudnnDataType_t type, const Shape& strides) {
  return add_tensor(
      dims, strides.empty() ? row_major_strides(dims) : strides, type, Place::kInner, 16);
}

int64_t Graph::scalar(size_t ndim) {
  const Shape ones(ndim, 1);
  return add_tensor(ones, ones, CUDNN_DATA_FLOAT, Place::kHost, sizeof(float));
}

void Graph::pointwise(cudnnPointwiseMode_t mode,
                      const std::vector<int64_t>& inputs,
                      int64_t y,
                      int64_t axis) {
  Descriptor maths(CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
  maths.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, std::vector{mode});
  maths.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, std::vector{CUDNN_DATA_FLOAT});
  if (axis >= 0) {
    maths.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, std::vector{axis});
  }
  maths.finalize();
  const PointwiseNames names = pointwise_names(mode);
  Descriptor operation(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, maths);
  operation.set(names.first, descriptor(inputs.at(0)));
  if (inputs.size() > 1) {
    operation.set(names.second, descriptor(inputs[1]));
  }
  if (inputs.size() > 2) {
    operation.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, descriptor(inputs[2]));
  }
  operation.set(names.y, descriptor(y));
  operation.finalize();
  add(std::move(operation));
}

void Graph::matmul(int64_t a, int64_t b, int64_t c) {
  Descriptor maths(CUDNN_BACKEND_MATMUL_DESCRIPTOR);
  maths.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, std::vector{CUDNN_DATA_FLOAT});
  maths.finalize();
  Descriptor operation(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, maths);
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, descriptor(a));
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, descriptor(b));
  operation.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, descriptor(c));
  operation.finalize();
  add(std::move(operation));
}

void Graph::reduction(cudnnReduceTensorOp_t op, int64_t x, int64_t y) {
  Descriptor maths(CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
  maths.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, std::vector{op});
  maths.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, std::vector{CUDNN_DATA_FLOAT});
  maths.finalize();
  Descriptor operation(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, maths);
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, descriptor(x));
  operation.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, descriptor(y));
  operation.finalize();
  add(std::move(operation));
}

void Graph::reshape(int64_t x, int64_t y) {
  Descriptor operation(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, descriptor(x));
  operation.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, descriptor(y));
  operation.finalize();
  add(std::move(operation));
}

Descriptor Graph::build(cudnnHandle_t handle) const {
  std::vector<cudnnBackendDescriptor_t> operations;
  for (const Descriptor& operation : operations_) {
    operations.push_back(operation.get());
  }
  Descriptor graph(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, std::vector{handle});
  graph.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, operations);
  graph.finalize();
  return graph;
}

namespace {

struct Candidate {
  std::string name;
  Descriptor plan;
};

// What an engine must keep to, beside adding in float32.
struct EngineRules {
  bool deterministic = false;  // equal bits in every run
  bool exact_fp32 = false;     // float32 operands are not rounded to TF32
  int64_t workspace = 0;       // at most
};

// What an engine does that the rules forbid; null: nothing.
const char* forbidden(const Descriptor& config, const EngineRules& rules) {
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
    // Sums of 16 bits, though the graph asks for float32's.
    if (note == CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION) {
      return "adds in 16 bits";
    }
    // Tensor cores take float32 as TF32.
    if (rules.exact_fp32 && (note == CUDNN_NUMERICAL_NOTE_TENSOR_CORE ||
                             note == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS)) {
      return "rounds float32";
    }
    if (rules.deterministic && note == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) {
      return "is not deterministic";
    }
  }
  return nullptr;
}

// The plan of an engine, which works on this device and within the workspace.
Descriptor plan_of(const Descriptor& config, cudnnHandle_t handle, const EngineRules& rules) {
  const char* const does = forbidden(config, rules);
  TRAINRT_REQUIRE(does == nullptr, kDevice, does);
  Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, std::vector{handle});
  plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
  plan.finalize();
  int64_t count = 0, workspace = 0;
  TRAINRT_CUDA_CHECK(cudnnBackendGetAttribute(plan.get(),
                                              CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
                                              CUDNN_TYPE_INT64,
                                              1,
                                              &count,
                                              &workspace));
  TRAINRT_REQUIRE(workspace <= rules.workspace,
                  kDevice,
                  "wants ",
                  workspace,
                  " bytes of workspace, of ",
                  rules.workspace);
  return plan;
}

std::vector<Descriptor> proposals(const Descriptor& graph, cudnnBackendHeurMode_t mode) {
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
  while (static_cast<int64_t>(configs.size()) > count) {  // fewer than announced were filled in
    configs.pop_back();
  }
  return configs;
}

void execute(CudaContext& context,
             const Descriptor& plan,
             const PlannedGraph::Pointers& pointers,
             std::span<std::byte> workspace) {
  std::vector<int64_t> ids;
  std::vector<void*> addresses;
  for (const auto& [id, address] : pointers) {
    ids.push_back(id);
    addresses.push_back(const_cast<void*>(address));
  }
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, ids);
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, addresses);
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE,
           CUDNN_TYPE_VOID_PTR,
           std::vector<void*>{aligned(workspace).data()});
  pack.finalize();
  TRAINRT_CUDA_CHECK(cudnnBackendExecute(context.cudnn(), plan.get(), pack.get()));
}

float milliseconds(CudaContext& context,
                   const Descriptor& plan,
                   const PlannedGraph::Pointers& pointers,
                   std::span<std::byte> workspace) {
  cuda::Event begin, end;
  TRAINRT_CUDA_CHECK(cudaEventCreateWithFlags(begin.put(), cudaEventDefault));
  TRAINRT_CUDA_CHECK(cudaEventCreateWithFlags(end.put(), cudaEventDefault));
  execute(context, plan, pointers, workspace);  // once for what the first run makes ready
  TRAINRT_CUDA_CHECK(cudaEventRecord(begin.get(), context.cuda_stream()));
  for (int i = 0; i < kMeasuredRuns; ++i) {
    execute(context, plan, pointers, workspace);
  }
  TRAINRT_CUDA_CHECK(cudaEventRecord(end.get(), context.cuda_stream()));
  TRAINRT_CUDA_CHECK(cudaEventSynchronize(end.get()));
  float elapsed = 0;
  TRAINRT_CUDA_CHECK(cudaEventElapsedTime(&elapsed, begin.get(), end.get()));
  return elapsed;
}

// The search for the engine of one graph.
class Search {
 public:
  Search(CudaContext& context,
         const Descriptor& graph,
         const EngineRules& rules,
         const PlannedGraph::Pointers& pointers,
         std::span<std::byte> workspace,
         std::vector<std::string>& refusals)
      : context_(context),
        graph_(graph),
        rules_(rules),
        pointers_(pointers),
        workspace_(workspace),
        refusals_(refusals) {}

  // `known`: what an earlier search found.
  std::optional<Candidate> find(const std::optional<std::string>& known) {
    if (known) {
      if (std::optional<Candidate> found = named(*known)) {
        return found;
      }
    }
    std::optional<Candidate> found = best(CUDNN_HEUR_MODE_A);
    return found ? std::move(found) : best(CUDNN_HEUR_MODE_FALLBACK);
  }

 private:
  // If it still runs.
  std::optional<Candidate> named(const std::string& name) {
    const cudnnBackendHeurMode_t mode =
        name[0] == 'A' ? CUDNN_HEUR_MODE_A : CUDNN_HEUR_MODE_FALLBACK;
    const std::vector<Descriptor> configs = configs_of(mode);
    for (size_t i = 0; i < configs.size(); ++i) {
      if (name_of(mode, i) == name) {
        std::optional<Candidate> candidate = planned(name, configs[i]);
        return candidate && runs(*candidate) ? std::move(candidate) : std::nullopt;
      }
    }
    return std::nullopt;
  }

  // The first that runs, where runs must repeat; else the fastest.
  std::optional<Candidate> best(cudnnBackendHeurMode_t mode) {
    const std::vector<Descriptor> configs = configs_of(mode);
    std::vector<Candidate> found;
    for (size_t i = 0; i < configs.size() && found.size() < kMostCandidates; ++i) {
      std::optional<Candidate> candidate = planned(name_of(mode, i), configs[i]);
      if (candidate && rules_.deterministic && runs(*candidate)) {
        return candidate;
      }
      if (candidate && !rules_.deterministic) {
        found.push_back(std::move(*candidate));
      }
    }
    Candidate* const fastest = fastest_of(found);
    return fastest == nullptr ? std::nullopt : std::optional(std::move(*fastest));
  }

  // The same for the same graph, device and version of cuDNN.
  static std::string name_of(cudnnBackendHeurMode_t mode, size_t i) {
    return concat(mode == CUDNN_HEUR_MODE_A ? "A" : "F", i);
  }
  bool runs(const Candidate& candidate) {
    return taken(context_, candidate.name, refusals_, [&] {
      execute(context_, candidate.plan, pointers_, workspace_);
    });
  }
  // None: a mode may not know graphs of this kind.
  std::vector<Descriptor> configs_of(cudnnBackendHeurMode_t mode) {
    std::vector<Descriptor> configs;
    taken(context_, mode == CUDNN_HEUR_MODE_A ? "A" : "F", refusals_, [&] {
      configs = proposals(graph_, mode);
    });
    return configs;
  }
  std::optional<Candidate> planned(const std::string& name, const Descriptor& config) {
    std::optional<Candidate> candidate;
    taken(context_, name, refusals_, [&] {
      candidate.emplace(Candidate{name, plan_of(config, context_.cudnn(), rules_)});
    });
    return candidate;
  }
  Candidate* fastest_of(std::vector<Candidate>& candidates) {
    if (candidates.size() == 1) {
      return runs(candidates[0]) ? &candidates[0] : nullptr;
    }
    Candidate* best = nullptr;
    float least = std::numeric_limits<float>::infinity();
    for (Candidate& candidate : candidates) {
      float elapsed = least;
      taken(context_, candidate.name, refusals_, [&] {
        elapsed = milliseconds(context_, candidate.plan, pointers_, workspace_);
      });
      if (elapsed < least) {
        least = elapsed;
        best = &candidate;
      }
    }
    return best;
  }

  CudaContext& context_;
  const Descriptor& graph_;
  const EngineRules& rules_;
  const PlannedGraph::Pointers& pointers_;
  std::span<std::byte> workspace_;
  std::vector<std::string>& refusals_;
};

// `problem`: all that the choice depends on.
Choice choose(CudaContext& context,
              const std::string& problem,
              const EngineRules& rules,
              const std::function<Graph()>& build,
              const PlannedGraph::Pointers& pointers,
              std::span<std::byte> workspace) {
  Choice choice;
  const cudnnHandle_t handle = context.cudnn();  // without one nothing is a refusal
  std::optional<Graph> graph;                    // outlives what refers to its tensors
  std::optional<Descriptor> operations;
  const bool takes = taken(context, "its graph", choice.refusals, [&] {
    graph.emplace(build());
    operations.emplace(graph->build(handle));
  });
  if (!takes) {
    return choice;
  }
  Search search(context, *operations, rules, pointers, workspace, choice.refusals);
  const std::optional<std::string> known = context.algorithms().find(problem);
  if (std::optional<Candidate> found = search.find(known)) {
    if (found->name != known) {
      context.algorithms().keep(problem, found->name);
    }
    choice.plan.emplace(std::move(found->plan));
  }
  return choice;
}

}  // namespace

bool PlannedGraph::run(CudaContext& context,
                       const std::function<Graph()>& build,
                       const Pointers& pointers,
                       std::span<std::byte> workspace) {
  if (choice_ == nullptr) {
    // The same wherever the workspace lies.
    const int64_t room = std::max<int64_t>(
        0, static_cast<int64_t>(workspace.size()) - static_cast<int64_t>(kWorkspaceAlignment));
    const EngineRules rules{context.deterministic(), is_fp32_ && !context.tf32(), room};
    const std::string problem = concat(context.device_name(),
                                       "|cuDNN ",
                                       cudnnGetVersion(),
                                       "|",
                                       key_,
                                       is_fp32_ && !rules.exact_fp32 ? " tf32 " : " ",
                                       rules.deterministic ? "deterministic " : "",
                                       room);
    std::shared_ptr<const void>& known = context.shared(problem);
    if (known == nullptr) {
      known = std::make_shared<const Choice>(
          choose(context, problem, rules, build, pointers, workspace));
    }
    choice_ = std::static_pointer_cast<const Choice>(known);
  }
  if (choice_->plan) {
    execute(context, *choice_->plan, pointers, workspace);
  }
  return choice_->plan.has_value();
}

std::string PlannedGraph::why_not() const {
  std::string text = concat("cuDNN ", cudnnGetVersion(), " has no engine for ", key_);
  const std::vector<std::string>& refusals = choice_->refusals;
  for (const std::string& refusal : refusals) {
    text += (&refusal == &refusals.front() ? " (" : "; ") + refusal;
  }
  return refusals.empty() ? text : text + ")";
}

}  // namespace trainrt::cudnn
