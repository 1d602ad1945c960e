// See ops/conv_cudnn.cuh.
#include "graph/base/log.h"
#include "ops/conv_cudnn.cuh"
#include "ops/convolution.h"
#include "ops/strided_copy.cuh"

namespace trainrt::cudnn {

namespace {

constexpr int64_t kAlignment = 64;
enum ConvTensor : int64_t { kX = 1, kW, kY };  // in the order of their making

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
  Shape kernel, strides, dilations, pads_begin, pads_end;
  TensorLayout x, w, y, own_w;  // own_w: as the graph holds the weight
  int64_t copy_bytes = 0;       // of the weight in cuDNN's order, at the workspace's start
  bool warned = false;
  PlannedGraph planned;

  explicit Impl(const OpContext& op)
      : op_type(op.node().op_type),
        node_name(op.node().name),
        dtype(op.input_dtype(0)),
        conv(convolution_of(op)),
        planned("", dtype) {
    const Window& window = conv.window;
    const bool last = window.channels_last;
    kernel = with_plane(window.kernel, 1);
    strides = with_plane(window.strides, 1);
    dilations = with_plane(window.dilations, 1);
    pads_begin = with_plane(window.pads_begin, 0);
    pads_end = with_plane(window.pads_end, 0);
    x = layout_of(conv.n, conv.c, with_plane(conv.input, 1), last);
    y = layout_of(conv.n, conv.m, with_plane(conv.output, 1), last);
    w = layout_of(conv.m, conv.c / conv.group, kernel, last);
    own_w = layout_of(conv.m, conv.c / conv.group, kernel, false);
    if (last) {
      copy_bytes = round_up(num_elements(w.dims) * dtype_bytes(dtype));
    }
    planned = PlannedGraph(key(), dtype);
  }

  std::string key() const {
    return concat(op_type,
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
                  shape_string(pads_begin),
                  shape_string(pads_end));
  }

  Graph graph() const {
    Graph g;
    const cudnnDataType_t type = data_type(dtype);
    g.tensor(x.dims, x.strides, type);
    g.tensor(w.dims, w.strides, type);
    g.tensor(y.dims, y.strides, type);
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
    convolution.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, pads_begin);
    convolution.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, pads_end);
    convolution.finalize();
    const OperationKind kind = kind_of(op_type);
    Descriptor operation(kind.type);
    operation.set(kind.convolution, convolution);
    operation.set(kind.x, g.descriptor(kX));
    operation.set(kind.w, g.descriptor(kW));
    operation.set(kind.y, g.descriptor(kY));
    operation.set(kind.alpha, CUDNN_TYPE_FLOAT, std::vector{1.0f});
    operation.set(kind.beta, CUDNN_TYPE_FLOAT, std::vector{0.0f});
    operation.finalize();
    g.add(std::move(operation));
    return g;
  }
};

const char* why_not_asked(const OpContext& op) {
  const int ndim = convolution_of(op).window.ndim();
  return op.input_dtype(0) == DType::kFloat64 ? "float64"
         : ndim < 1 || ndim > 3               ? "other than one to three spatial dims"
                                              : nullptr;
}

ConvolutionPlan::ConvolutionPlan(const OpContext& op) : impl_(std::make_unique<Impl>(op)) {}

ConvolutionPlan::~ConvolutionPlan() = default;

bool ConvolutionPlan::run(KernelContext& context) {
  Impl& p = *impl_;
  std::byte* room = context.workspace().data();
  TRAINRT_CHECK(static_cast<int64_t>(context.workspace().size()) >= p.copy_bytes,
                p.node_name,
                ": the weight's copy needs ",
                p.copy_bytes);
  const bool copies = p.copy_bytes > 0, weight_grad = p.op_type == "ConvWeightGrad";
  void* first = context.raw_input(0);
  void* second = context.raw_input(1);
  void* out = context.raw_output(0);
  void* own_w = weight_grad ? out : second;
  void* w = copies ? room : own_w;
  if (copies && !weight_grad) {
    copy_views(context, p.dtype, p.w.dims, {w, p.w.strides}, {own_w, p.own_w.strides});
  }
  const void* x = p.op_type == "ConvInputGrad" ? out : first;
  const void* y = p.op_type == "Conv" ? out : p.op_type == "ConvInputGrad" ? first : second;
  const std::span<std::byte> rest = context.workspace().subspan(static_cast<size_t>(p.copy_bytes));
  const bool ran = p.planned.run(
      cuda_context(context), [&] { return p.graph(); }, {{kX, x}, {kW, w}, {kY, y}}, rest);
  if (!ran && !std::exchange(p.warned, true)) {
    log_warning("node '", p.node_name, "': a slow kernel runs: ", p.planned.why_not());
  }
  if (ran && copies && weight_grad) {
    copy_views(context, p.dtype, p.w.dims, {own_w, p.own_w.strides}, {w, p.w.strides});
  }
  return ran;
}

}  // namespace trainrt::cudnn
