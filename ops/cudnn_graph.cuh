// Graphs of cuDNN's backend API, and the engines that run them: shared by all that goes through
// cuDNN (convolutions, attention, pools, norms).
#pragma once

#include <cudnn.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "graph/base/cuda_check.h"
#include "graph/cuda_context.h"
#include "graph/dtype.h"
#include "graph/shape.h"

namespace trainrt::cudnn {

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
  void set(cudnnBackendAttributeName_t name, bool value) {
    TRAINRT_CUDA_CHECK(cudnnBackendSetAttribute(handle_, name, CUDNN_TYPE_BOOLEAN, 1, &value));
  }
  void finalize() { TRAINRT_CUDA_CHECK(cudnnBackendFinalize(handle_)); }

 private:
  cudnnBackendDescriptor_t handle_ = nullptr;
};

cudnnDataType_t data_type(DType dtype);

// Tensors and operations in the order of their making; both are known by the numbers given back.
class Graph {
 public:
  // In memory, aligned to so many bytes: the memory plan aligns to 64.
  int64_t tensor(const Shape& dims,
                 const Shape& strides,
                 cudnnDataType_t type,
                 int64_t alignment = 64);
  // Between two operations, never in memory. Row-major unless strides are given.
  int64_t inner(const Shape& dims, cudnnDataType_t type, const Shape& strides = {});
  // One float32 in host memory, read at every run. `ndim`: of the tensors it meets.
  int64_t scalar(size_t ndim);

  // y = mode(x[, b[, t]]); for BINARY_SELECT y = t ? x : b. `axis`: of GEN_INDEX.
  void pointwise(cudnnPointwiseMode_t mode,
                 const std::vector<int64_t>& inputs,
                 int64_t y,
                 int64_t axis = -1);
  void matmul(int64_t a, int64_t b, int64_t c);
  // Over the dims that are 1 in y.
  void reduction(cudnnReduceTensorOp_t op, int64_t x, int64_t y);
  // The same elements with the dims and strides of y.
  void reshape(int64_t x, int64_t y);
  // Any other operation: the caller sets its attributes and finalizes it.
  void add(Descriptor operation) { operations_.push_back(std::move(operation)); }

  const Descriptor& descriptor(int64_t id) const {
    return tensors_.at(static_cast<size_t>(id - 1));
  }
  Descriptor build(cudnnHandle_t handle) const;

 private:
  enum class Place { kMemory, kInner, kHost };
  int64_t add_tensor(const Shape& dims,
                     const Shape& strides,
                     cudnnDataType_t type,
                     Place place,
                     int64_t alignment);
  std::vector<Descriptor> tensors_, operations_;
};

// What the search for a graph's engine came to. Engines add in float32 and keep within the
// workspace; where runs must repeat they give equal bits; float32 is rounded to TF32 only where the
// device may.
struct Choice {
  std::optional<Descriptor> plan;     // none: no engine
  std::vector<std::string> refusals;  // in the order in which engines were asked
};

// A graph, and the engine that runs it: of those proposed the one that was fastest in a measurement
// at the first run; the first one where runs must repeat. What cuDNN refuses, be it the graph, an
// engine's plan or its run, is no error: the next engine is asked.
//
// To make a plan may take seconds, in which kernels are compiled. So graphs of one problem on a
// device share theirs, and the device's AlgorithmCache keeps the engine's name for runs to come,
// which make this one plan.
class PlannedGraph {
 public:
  // `key` names the problem among all that this program makes graphs for, and says all that the
  // graph is made from; `dtype`: of the operands.
  PlannedGraph(std::string key, DType dtype)
      : key_(std::move(key)), is_fp32_(dtype == DType::kFloat32) {}

  using Pointers = std::vector<std::pair<int64_t, const void*>>;  // tensor, where it lies

  // Chooses at the first call; false: no engine can, why_not() says why, and what the graph writes
  // may hold anything. The answer is the same at every call. `build` makes the graph. Choosing runs
  // the graph several times.
  bool run(CudaContext& context,
           const std::function<Graph()>& build,
           const Pointers& pointers,
           std::span<std::byte> workspace);

  // What was asked for, and what cuDNN said to each attempt.
  std::string why_not() const;

 private:
  std::string key_;
  bool is_fp32_;
  std::shared_ptr<const Choice> choice_;  // null: not asked yet
};

}  // namespace trainrt::cudnn
