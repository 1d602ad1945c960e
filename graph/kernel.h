// What a kernel sees of the device it runs on, and of the tensors it works on. Implemented by
// runtime/{cpu,cuda}_device; used by ops/ and by the communicators.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "graph/graph.h"

namespace trainrt {

enum class Backend : uint8_t { kCpu, kCuda };

// Everything about a device that the choice of a kernel and the size of its workspace may depend
// on. Equal specs give equal programs, to the byte.
struct DeviceSpec {
  Backend backend = Backend::kCpu;
  std::string isa = "native";         // "avx512", "avx2", ... or "sm_90"
  int threads = 1;                    // CPU threads of this rank
  int64_t workspace_cap = 256 << 20;  // most bytes one operator may ask for
  bool reference_kernels = false;     // run the plain reference kernels (float64 checks, TSan)

  bool operator==(const DeviceSpec&) const = default;
};

// The device as a running kernel sees it.
class DeviceContext {
 public:
  virtual ~DeviceContext() = default;
  virtual const DeviceSpec& spec() const = 0;

  // Calls fn(begin, end) over [0, n) cut into blocks of `grain` (the last may be short). The cut
  // depends on n and grain alone, never on the number of threads, so results do not either.
  // CPU only. fn must not throw and must not call parallel_for.
  virtual void parallel_for(int64_t n,
                            int64_t grain,
                            const std::function<void(int64_t, int64_t)>& fn) = 0;

  // The cudaStream_t the kernel must launch on; null on the CPU.
  virtual void* stream() = 0;
};

// Where in the training run a kernel is called.
//
// (seed, step, first_sample) key the stateless random numbers: the draw for an element depends on
// them, on the node, and on the element's index within the unsharded sample, and on nothing else,
// so dropout is the same under recompute, any split over ranks, and after a resume.
struct StepContext {
  uint64_t seed = 0;
  uint64_t step = 0;          // optimizer step
  uint64_t first_sample = 0;  // global index, within the step, of the micro-batch's first sample
  bool first_micro_batch =
      true;  // of this rank in this step: Accumulate overwrites instead of adds
};

struct TensorRef {
  void* data = nullptr;
  const TensorType* type = nullptr;  // null: an absent optional input or output
};

class KernelContext {
 public:
  KernelContext(const Node& node,
                std::span<const TensorRef> inputs,
                std::span<const TensorRef> outputs,
                std::span<std::byte> workspace,
                DeviceContext& device,
                const StepContext& step)
      : node_(node),
        inputs_(inputs),
        outputs_(outputs),
        workspace_(workspace),
        device_(device),
        step_(step) {}

  const Node& node() const { return node_; }
  const Attributes& attributes() const { return node_.attributes; }
  int num_inputs() const { return static_cast<int>(inputs_.size()); }
  int num_outputs() const { return static_cast<int>(outputs_.size()); }
  bool has_input(int i) const { return i < num_inputs() && inputs_[i].type != nullptr; }
  bool has_output(int i) const { return i < num_outputs() && outputs_[i].type != nullptr; }
  const TensorType& input_type(int i) const { return *inputs_[i].type; }
  const TensorType& output_type(int i) const { return *outputs_[i].type; }
  const Shape& input_shape(int i) const { return inputs_[i].type->shape; }
  const Shape& output_shape(int i) const { return outputs_[i].type->shape; }
  DType input_dtype(int i) const { return inputs_[i].type->dtype; }
  DType output_dtype(int i) const { return outputs_[i].type->dtype; }

  // Typed pointers; null for an absent optional tensor. T must be the tensor's element type.
  template <typename T>
  const T* input(int i) const {
    if (!has_input(i)) {
      return nullptr;
    }
    TRAINRT_CHECK(dtype_of<T> == input_dtype(i),
                  node_.name,
                  ": input ",
                  i,
                  " is ",
                  dtype_name(input_dtype(i)));
    return static_cast<const T*>(inputs_[i].data);
  }
  template <typename T>
  T* output(int i) const {
    if (!has_output(i)) {
      return nullptr;
    }
    TRAINRT_CHECK(dtype_of<T> == output_dtype(i),
                  node_.name,
                  ": output ",
                  i,
                  " is ",
                  dtype_name(output_dtype(i)));
    return static_cast<T*>(outputs_[i].data);
  }
  void* raw_input(int i) const { return has_input(i) ? inputs_[i].data : nullptr; }
  void* raw_output(int i) const { return has_output(i) ? outputs_[i].data : nullptr; }

  // Exactly OpDef::workspace bytes, 64-byte aligned (256 on CUDA), contents undefined.
  std::span<std::byte> workspace() const { return workspace_; }
  DeviceContext& device() const { return device_; }
  const StepContext& step() const { return step_; }

  void parallel_for(int64_t n,
                    int64_t grain,
                    const std::function<void(int64_t, int64_t)>& fn) const {
    device_.parallel_for(n, grain, fn);
  }

 private:
  const Node& node_;
  std::span<const TensorRef> inputs_;
  std::span<const TensorRef> outputs_;
  std::span<std::byte> workspace_;
  DeviceContext& device_;
  const StepContext& step_;
};

using Kernel = std::function<void(KernelContext&)>;

}  // namespace trainrt
