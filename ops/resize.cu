// CUDA kernels of Resize and its gradient. Each resized axis is a sparse matrix (ops/resize.h) and
// takes one launch, from tensor to buffer to tensor; the tables of all axes are copied to the
// workspace first, those of the gradient transposed. One thread per element written.
#include <cstring>
#include <memory>
#include <utility>

#include "graph/cuda_handle.h"
#include "ops/elementwise.cuh"
#include "ops/launch.cuh"
#include "ops/resize.h"
#include "ops/resize_scratch.h"

namespace trainrt {

namespace {

template <typename C>
struct ResizeAxis {
  using S = elementwise::StoredFloat<C>;
  const int32_t *starts, *index;
  const double *weights, *constant;
  int64_t from_size, to_size, inner;
  const void* from;
  void* to;
  DType from_dtype, to_dtype;

  TRAINRT_HOST_DEVICE void operator()(int64_t at) const {
    const int64_t j = at % inner, i = at / inner % to_size, o = at / (inner * to_size);
    C sum = constant == nullptr ? C(0) : static_cast<C>(constant[i]);
    for (int32_t t = starts[i]; t < starts[i + 1]; ++t) {
      sum += static_cast<C>(weights[t]) *
             S::load(from, from_dtype, (o * from_size + index[t]) * inner + j);
    }
    S::store(to, to_dtype, at, sum);
  }
};

// The tables in pinned memory: a recorded copy reads them anew whenever it is replayed, which CUDA
// does not do from memory that may move.
class PinnedTables {
 public:
  explicit PinnedTables(ResizeTables tables) : tables_(std::move(tables)) {}
  const std::vector<ResizeStep>& steps() const { return tables_.steps; }
  void copy_to(std::byte* device, cudaStream_t stream) {
    const size_t bytes = tables_.blob.size();
    if (pinned_.get() == nullptr) {
      TRAINRT_CUDA_CHECK(cudaHostAlloc(pinned_.put(), bytes, cudaHostAllocDefault));
      std::memcpy(pinned_.get(), tables_.blob.data(), bytes);
    }
    TRAINRT_CUDA_CHECK(
        cudaMemcpyAsync(device, pinned_.get(), bytes, cudaMemcpyHostToDevice, stream));
  }

 private:
  ResizeTables tables_;
  cuda::PinnedMemory pinned_;
};

template <typename C>
void run_steps(KernelContext& context, const ResizeProblem& p, PinnedTables& tables) {
  const int64_t room = resize_buffer_bytes(p, context.input_dtype(0));
  std::byte* buffers[] = {context.workspace().data(), context.workspace().data() + room};
  std::byte* blob = context.workspace().data() + 2 * room;
  tables.copy_to(blob, cuda_context(context).cuda_stream());
  Shape shape = p.transposed ? p.out : p.in;
  const void* from = context.raw_input(0);
  DType from_dtype = context.input_dtype(0);
  for (size_t s = 0; s < tables.steps().size(); ++s) {
    const ResizeStep& step = tables.steps()[s];
    const bool last = s + 1 == tables.steps().size();
    shape[static_cast<size_t>(step.axis)] = step.to;
    ResizeAxis<C> axis{
        reinterpret_cast<const int32_t*>(blob + step.starts),
        reinterpret_cast<const int32_t*>(blob + step.index),
        reinterpret_cast<const double*>(blob + step.weights),
        step.constant < 0 ? nullptr : reinterpret_cast<const double*>(blob + step.constant),
        step.from,
        step.to,
        dims_product(shape, step.axis + 1, static_cast<int>(shape.size())),
        from,
        last ? context.raw_output(0) : buffers[s % 2],
        from_dtype,
        last ? context.output_dtype(0) : dtype_of<C>};
    launch(context, num_elements(shape), axis);
    from = axis.to;
    from_dtype = axis.to_dtype;
  }
}

Kernel resize_cuda(const OpContext& op, const DeviceSpec&) {
  const ResizeProblem p = resize_problem(op);
  auto tables = std::make_shared<PinnedTables>(resize_tables(p, op.attributes()));
  return [p, tables](KernelContext& context) {
    if (tables->steps().empty()) {
      TRAINRT_CUDA_CHECK(cudaMemcpyAsync(context.raw_output(0),
                                         context.raw_input(0),
                                         static_cast<size_t>(context.output_type(0).bytes()),
                                         cudaMemcpyDeviceToDevice,
                                         cuda_context(context).cuda_stream()));
    } else if (context.input_dtype(0) == DType::kFloat64) {
      run_steps<double>(context, p, *tables);
    } else {
      run_steps<float>(context, p, *tables);
    }
  };
}

const RegisterKernel kResize{"Resize", Backend::kCuda, resize_cuda};
const RegisterKernel kResizeGrad{"ResizeGrad", Backend::kCuda, resize_cuda};

}  // namespace

}  // namespace trainrt
