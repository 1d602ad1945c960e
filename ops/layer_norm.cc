// LayerNormalization: over dims [axis, ndim), y = (x - mean) inv_std scale + bias, with
// inv_std = 1 / sqrt(var + epsilon), var over the population. RMSNormalization: the same with mean
// taken as 0 and no bias (Zhang & Sennrich, "Root Mean Square Layer Normalization", 2019).
//
//   LayerNormalization(x, scale[, bias])        -> y, mean, inv_std     axis, epsilon
//   LayerNormGrad(dy, x, scale, mean, inv_std)  -> dx, dscale, dbias
//   RMSNormalization(x, scale)                  -> y, inv_rms
//   RMSNormGrad(dy, x, scale, inv_rms)          -> dx, dscale
//
// scale and bias have the shape of the normalized dims; mean and inv_std keep x's number of dims
// with 1 there, as ONNX's optional outputs do, and are float32 where x has 16 bits: rounded to
// those, the mean of a row that lies twenty deviations off is wrong by a large part of one. With h
// = (x - mean) inv_std and g = dy scale, dx = inv_std (g - mean(g) - h mean(g h)), dscale = sum dy
// h, dbias = sum dy (rows in blocks fixed by the shape, each with its sums in the workspace, added
// in order).
#include <cmath>

#include "graph/autodiff.h"
#include "graph/passes/fusion.h"
#include "graph/upgrade.h"
#include "ops/onnx_dtype.h"
#include "ops/rows.h"

namespace trainrt {

namespace {

constexpr int64_t kMaxBlocks = 128;  // of rows, for the sums over rows
constexpr int64_t kBatch = 16;       // rows summed in T before the sum goes on in double

// Rows and their length.
struct RowView {
  int64_t rows = 1, length = 1;
  int64_t block = 1;  // rows per block
  int64_t num_blocks() const { return (rows + block - 1) / block; }
};

template <typename Context>
int axis_of(const Context& op, int x) {
  return normalize_axis(op.attributes().get_int("axis", -1),
                        static_cast<int>(op.input_shape(x).size()));
}

template <typename Context>
RowView rows_of(const Context& op) {
  const std::string& type = op.node().op_type;
  const int input = type == "LayerNormGrad" || type == "RMSNormGrad" ? 1 : 0;
  const Shape& x = op.input_shape(input);
  const int axis = axis_of(op, input);
  RowView view{dims_product(x, 0, axis), dims_product(x, axis, static_cast<int>(x.size())), 1};
  view.block = std::max<int64_t>(kBatch, (view.rows + kMaxBlocks - 1) / kMaxBlocks);
  return view;
}

bool is_centered(const Node& node) {
  return node.op_type == "LayerNormalization" || node.op_type == "LayerNormGrad";
}

// ---- forward ---------------------------------------------------------------------------------

// C is the type the row is computed in.
template <typename C, typename T>
void forward_row(const T* x,
                 const T* scale,
                 const T* bias,
                 T* y,
                 int64_t n,
                 bool centered,
                 double epsilon,
                 double* mean_out,
                 double* inv_out) {
  const double count = static_cast<double>(n);
  const double mean =
      centered ? lane_sum<C>(n, [=](int64_t j) { return load<C>(x[j]); }) / count : 0;
  const C shift = static_cast<C>(mean);
  const double square = lane_sum<C>(n, [=](int64_t j) {
    const C deviation = load<C>(x[j]) - shift;
    return deviation * deviation;
  });
  const double inv = 1.0 / std::sqrt(square / count + epsilon);
  const C factor = static_cast<C>(inv);
  if (bias != nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      y[j] = store<T>((load<C>(x[j]) - shift) * factor * load<C>(scale[j]) + load<C>(bias[j]));
    }
  } else {
#pragma omp simd
    for (int64_t j = 0; j < n; ++j) {
      y[j] = store<T>((load<C>(x[j]) - shift) * factor * load<C>(scale[j]));
    }
  }
  *mean_out = mean;
  *inv_out = inv;
}

template <typename C, typename T>
void forward(KernelContext& op) {
  const RowView view = rows_of(op);
  const bool centered = is_centered(op.node());
  const double epsilon = op.attributes().get_float("epsilon", 1e-5);
  const T* x = op.input<T>(0);
  const T* scale = op.input<T>(1);
  const T* bias = op.input<T>(2);
  T* y = op.output<T>(0);
  using S = Compute<T>;
  S* mean_out = centered ? op.output<S>(1) : nullptr;
  S* inv_out = op.output<S>(centered ? 2 : 1);
  op.parallel_for(view.rows, row_grain(view.length), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      double mean, inv;
      forward_row<C>(x + r * view.length,
                     scale,
                     bias,
                     y + r * view.length,
                     view.length,
                     centered,
                     epsilon,
                     &mean,
                     &inv);
      if (mean_out != nullptr) {
        mean_out[r] = static_cast<S>(mean);
      }
      if (inv_out != nullptr) {
        inv_out[r] = static_cast<S>(inv);
      }
    }
  });
}

// ---- backward --------------------------------------------------------------------------------

// What a gradient kernel reads and writes, for both operators; absent pointers are null.
template <typename T>
struct Backward {
  using S = Compute<T>;
  explicit Backward(const KernelContext& op) {
    const bool centered = is_centered(op.node());
    dy = op.input<T>(0);
    x = op.input<T>(1);
    scale = op.input<T>(2);
    mean = centered ? op.input<S>(3) : nullptr;
    inv = op.input<S>(centered ? 4 : 3);
    dx = op.output<T>(0);
    dscale = op.output<T>(1);
    dbias = centered ? op.output<T>(2) : nullptr;
  }
  const T *dy, *x, *scale;
  const S *mean, *inv;
  T *dx, *dscale, *dbias;
};

template <typename C, typename T>
void backward_row(const Backward<T>& t, int64_t r, int64_t n, bool centered) {
  const T* dy = t.dy + r * n;
  const T* x = t.x + r * n;
  T* dx = t.dx + r * n;
  const C mean = centered ? load<C>(t.mean[r]) : C(0), inv = load<C>(t.inv[r]);
  const T* scale = t.scale;
  const double count = static_cast<double>(n);
  const auto product = [=](int64_t j) { return load<C>(dy[j]) * load<C>(scale[j]); };
  const double sum_g = centered ? lane_sum<C>(n, product) : 0;
  const double sum_gh =
      lane_sum<C>(n, [=](int64_t j) { return product(j) * ((load<C>(x[j]) - mean) * inv); });
  const C mean_g = static_cast<C>(sum_g / count);
  const C mean_gh = static_cast<C>(sum_gh / count);
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) {
    const C g = product(j);
    const C h = (load<C>(x[j]) - mean) * inv;
    dx[j] = store<T>(inv * (g - mean_g - h * mean_gh));
  }
}

// Adds rows [begin, end) to the sums of a block: at most kBatch of them, in registers.
template <typename C, typename T>
void add_column_sums(
    const Backward<T>& t, int64_t begin, int64_t end, int64_t n, double* dscale, double* dbias) {
  C mean[kBatch], inv[kBatch];
  for (int64_t r = begin; r < end; ++r) {
    mean[r - begin] = t.mean != nullptr ? load<C>(t.mean[r]) : C(0);
    inv[r - begin] = load<C>(t.inv[r]);
  }
  constexpr int64_t kColumns = 64;
  for (int64_t first = 0; first < n; first += kColumns) {
    const int64_t columns = std::min(kColumns, n - first);
    C sum_h[kColumns] = {}, sum[kColumns] = {};
    for (int64_t r = begin; r < end; ++r) {
      const T* dy = t.dy + r * n + first;
      const T* x = t.x + r * n + first;
      const C m = mean[r - begin], scale = inv[r - begin];
#pragma omp simd
      for (int64_t j = 0; j < columns; ++j) {
        const C g = load<C>(dy[j]);
        sum[j] += g;
        sum_h[j] += g * ((load<C>(x[j]) - m) * scale);
      }
    }
    for (int64_t j = 0; j < columns; ++j) {
      dscale[first + j] += static_cast<double>(sum_h[j]);
      dbias[first + j] += static_cast<double>(sum[j]);
    }
  }
}

// Sums of blocks in the workspace: [block][dscale, dbias][length].
template <typename T>
void merge_blocks(KernelContext& op, const RowView& view, const Backward<T>& t, double* sums) {
  op.parallel_for(view.length, 512, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      double dscale = 0, dbias = 0;
      for (int64_t b = 0; b < view.num_blocks(); ++b) {
        dscale += sums[2 * b * view.length + j];
        dbias += sums[(2 * b + 1) * view.length + j];
      }
      if (t.dscale != nullptr) {
        t.dscale[j] = store<T>(dscale);
      }
      if (t.dbias != nullptr) {
        t.dbias[j] = store<T>(dbias);
      }
    }
  });
}

template <typename C, typename T>
void backward(KernelContext& op, double* sums) {
  const RowView view = rows_of(op);
  const bool centered = is_centered(op.node());
  const Backward<T> t(op);
  const bool wants_sums = t.dscale != nullptr || t.dbias != nullptr;
  op.parallel_for(view.num_blocks(), 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      double* dscale = sums + 2 * b * view.length;
      if (wants_sums) {
        std::fill(dscale, dscale + 2 * view.length, 0.0);
      }
      const int64_t end = std::min(view.rows, (b + 1) * view.block);
      for (int64_t r = b * view.block; r < end; r += kBatch) {
        const int64_t batch_end = std::min(end, r + kBatch);
        // Before dx, which may overwrite dy.
        if (wants_sums) {
          add_column_sums<C>(t, r, batch_end, view.length, dscale, dscale + view.length);
        }
        for (int64_t row = r; t.dx != nullptr && row < batch_end; ++row) {
          backward_row<C>(t, row, view.length, centered);
        }
      }
    }
  });
  if (wants_sums) {
    merge_blocks(op, view, t, sums);
  }
}

int64_t sums_count(const RowView& view) {
  return view.num_blocks() * 2 * view.length;
}

int64_t backward_workspace(const OpContext& op, const DeviceSpec&) {
  return sums_count(rows_of(op)) * static_cast<int64_t>(sizeof(double));
}

void backward_fast(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    backward<Compute<T>, T>(op, reinterpret_cast<double*>(op.workspace().data()));
  });
}

void forward_reference(KernelContext& op);

void forward_fast(KernelContext& op) {
  if (rows_of(op).length == 0) {
    forward_reference(op);  // rows of nothing have statistics all the same
    return;
  }
  dispatch_real(op.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    forward<Compute<T>, T>(op);
  });
}

// ---- reference -------------------------------------------------------------------------------

template <typename T>
void forward_plain(KernelContext& op) {
  using S = Compute<T>;
  const RowView view = rows_of(op);
  const bool centered = is_centered(op.node());
  const double n = static_cast<double>(view.length);
  const T* x = op.input<T>(0);
  for (int64_t r = 0; r < view.rows; ++r, x += view.length) {
    double mean = 0, variance = 0;
    for (int64_t j = 0; centered && j < view.length; ++j) {
      mean += load<double>(x[j]) / n;
    }
    for (int64_t j = 0; j < view.length; ++j) {
      variance += (load<double>(x[j]) - mean) * (load<double>(x[j]) - mean) / n;
    }
    const double inv = 1 / std::sqrt(variance + op.attributes().get_float("epsilon", 1e-5));
    for (int64_t j = 0; j < view.length; ++j) {
      const double bias = op.has_input(2) ? load<double>(op.input<T>(2)[j]) : 0.0;
      op.output<T>(0)[r * view.length + j] =
          store<T>((load<double>(x[j]) - mean) * inv * load<double>(op.input<T>(1)[j]) + bias);
    }
    if (centered && op.has_output(1)) {
      op.output<S>(1)[r] = static_cast<S>(mean);
    }
    if (S* inv_out = op.output<S>(centered ? 2 : 1)) {
      inv_out[r] = static_cast<S>(inv);
    }
  }
}

template <typename T>
void backward_plain(KernelContext& op) {
  const RowView view = rows_of(op);
  const bool centered = is_centered(op.node());
  const Backward<T> t(op);
  const int64_t length = view.length;
  std::vector<double> dscale(static_cast<size_t>(length)), dbias(dscale);
  for (int64_t r = 0; r < view.rows; ++r) {
    const double mean = centered ? load<double>(t.mean[r]) : 0.0, inv = load<double>(t.inv[r]);
    const auto h = [&](int64_t j) { return (load<double>(t.x[r * length + j]) - mean) * inv; };
    const auto g = [&](int64_t j) {
      return load<double>(t.dy[r * length + j]) * load<double>(t.scale[j]);
    };
    double mean_g = 0, mean_gh = 0;
    for (int64_t j = 0; j < length; ++j) {
      mean_g += centered ? g(j) / static_cast<double>(length) : 0.0;
      mean_gh += g(j) * h(j) / static_cast<double>(length);
      dscale[static_cast<size_t>(j)] += load<double>(t.dy[r * length + j]) * h(j);
      dbias[static_cast<size_t>(j)] += load<double>(t.dy[r * length + j]);
    }
    for (int64_t j = 0; t.dx != nullptr && j < length; ++j) {
      t.dx[r * length + j] = store<T>(inv * (g(j) - mean_g - h(j) * mean_gh));
    }
  }
  for (int64_t j = 0; j < length; ++j) {
    if (t.dscale != nullptr) {
      t.dscale[j] = store<T>(dscale[static_cast<size_t>(j)]);
    }
    if (t.dbias != nullptr) {
      t.dbias[j] = store<T>(dbias[static_cast<size_t>(j)]);
    }
  }
}

void forward_reference(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { forward_plain<decltype(tag)>(op); });
}

void backward_reference(KernelContext& op) {
  dispatch_real(op.input_dtype(0), [&](auto tag) { backward_plain<decltype(tag)>(op); });
}

// ---- description -----------------------------------------------------------------------------

Shape statistics_shape(const Shape& x, int axis) {
  Shape shape = x;
  std::fill(shape.begin() + axis, shape.end(), 1);
  return shape;
}

TensorTypes infer_forward(const OpContext& op) {
  require_real(op);
  const Shape& x = op.input_shape(0);
  const int axis = op.axis();
  const Shape normalized(x.begin() + axis, x.end());
  for (int i = 1; i < op.num_inputs(); ++i) {
    TRAINRT_REQUIRE(!op.has_input(i) ||
                        (op.input_shape(i) == normalized && op.input_dtype(i) == op.input_dtype(0)),
                    kInvalidModel,
                    op.node().op_type,
                    ": ",
                    i == 1 ? "scale" : "bias",
                    " is ",
                    dtype_name(op.input_dtype(i)),
                    shape_string(op.input_shape(i)),
                    ", wanted ",
                    dtype_name(op.input_dtype(0)),
                    shape_string(normalized));
  }
  const TensorType statistics{statistic_dtype(op.input_dtype(0)), statistics_shape(x, axis)};
  TensorTypes types = {op.input_type(0), statistics};
  if (is_centered(op.node())) {
    types.push_back(statistics);
  }
  return types;
}

TensorTypes infer_backward(const OpContext& op) {
  require_statistics(
      op,
      3,
      {statistic_dtype(op.input_dtype(1)), statistics_shape(op.input_shape(1), axis_of(op, 1))});
  TensorTypes types = {op.input_type(1), op.input_type(2)};
  if (is_centered(op.node())) {
    types.push_back(op.input_type(2));
  }
  return types;
}

// Rows split over every dim before the axis; the sums over rows are then partial.
ShardingRule sharding(const OpContext& op) {
  const std::string& type = op.node().op_type;
  const bool grad = type == "LayerNormGrad" || type == "RMSNormGrad";
  const bool centered = is_centered(op.node());
  const Shape& x = op.input_shape(grad ? 1 : 0);
  const int ndim = static_cast<int>(x.size()), axis = axis_of(op, grad ? 1 : 0);
  std::string rows, columns, ones;
  for (int d = 0; d < ndim; ++d) {
    (d < axis ? rows : columns) += concat(d < axis ? "r" : "n", d, " ");
    ones += d < axis ? "" : "1 ";
  }
  const std::string all = rows + columns, statistics = rows + ones;
  std::string equation;
  if (grad) {
    equation = concat(all,
                      ", ",
                      all,
                      ", ",
                      columns,
                      ", ",
                      statistics,
                      centered ? ", " + statistics : "",
                      " -> ",
                      all,
                      ", ",
                      columns,
                      centered ? ", " + columns : "");
  } else {
    equation = concat(all,
                      ", ",
                      columns,
                      op.num_inputs() > 2 ? ", " + columns : "",
                      " -> ",
                      all,
                      ", ",
                      statistics,
                      centered ? ", " + statistics : "");
  }
  Factors factors(op, equation);
  for (int d = 0; d < ndim; ++d) {
    if (d >= axis) {
      factors.whole(concat("n", d));
    } else if (grad) {
      factors.reduction(concat("r", d));
    }
  }
  if (grad) {
    factors.linear({{0}});
  }
  return factors;
}

// d mean / dx = 1 / n and d inv_std / dx = -inv_std^3 (x - mean) / n, in the statistics' type: only
// models that use ONNX's optional outputs get here.
ValueId through_statistics(GradientBuilder& g, bool centered) {
  const ValueId dmean = centered ? g.output_grad(1) : kNoValue;
  const ValueId dinv = g.output_grad(centered ? 2 : 1);
  if (dmean == kNoValue && dinv == kNoValue) {
    return kNoValue;
  }
  const double n = static_cast<double>(num_elements(g.input_shape(0))) /
                   static_cast<double>(num_elements(g.shape(g.saved_output(1))));
  ValueId dx = kNoValue;
  if (dmean != kNoValue) {
    dx = g.expand(g.mul(dmean, 1 / n), g.shape(g.input(0)));
  }
  if (dinv != kNoValue) {
    const ValueId inv = g.saved_output(centered ? 2 : 1);
    const ValueId x = g.cast(g.input(0), g.dtype(inv));
    const ValueId factor = g.mul(g.mul(dinv, g.mul(inv, g.mul(inv, inv))), -1 / n);
    const ValueId term = g.mul(centered ? g.sub(x, g.saved_output(1)) : x, factor);
    dx = dx == kNoValue ? term : g.add(dx, term);
  }
  return g.cast(dx, g.dtype(g.input(0)));
}

void gradient(GradientBuilder& g) {
  const bool centered = is_centered(g.node_ref());
  std::vector<ValueId> grads(3, kNoValue);
  if (g.output_grad(0) != kNoValue) {
    std::vector<ValueId> inputs = {g.output_grad(0), g.input(0), g.input(1)};
    for (int i = 1; i < g.num_outputs(); ++i) {
      inputs.push_back(g.saved_output(i));
    }
    const std::vector<ValueId> from_y =
        g.node(centered ? "LayerNormGrad" : "RMSNormGrad", inputs, g.attributes());
    std::copy(from_y.begin(), from_y.end(), grads.begin());
  }
  const ValueId extra = g.needs_grad(0) ? through_statistics(g, centered) : kNoValue;
  if (extra != kNoValue) {
    grads[0] = grads[0] == kNoValue ? extra : g.add(grads[0], extra);
  }
  for (int i = 0; i < g.num_inputs(); ++i) {
    if (g.needs_grad(i) && grads[static_cast<size_t>(i)] != kNoValue) {
      g.set_input_grad(i, grads[static_cast<size_t>(i)]);
    }
  }
}

// Fits scale or bias, which broadcast in ONNX, to the normalized dims.
ValueId fitted(GraphBuilder& b, ValueId value, const Shape& normalized) {
  if (b.shape(value) == normalized) {
    return value;
  }
  if (num_elements(b.shape(value)) == num_elements(normalized)) {
    return b.reshape(value, normalized);
  }
  return b.expand(value, normalized);
}

void upgrade(UpgradeContext& u) {
  const ValueId x = u.input(0);
  const Shape shape = u.shape(x);
  const int axis =
      normalize_axis(u.attributes().get_int("axis", -1), static_cast<int>(shape.size()));
  const Shape normalized(shape.begin() + axis, shape.end());
  const bool centered = u.op_type() == "LayerNormalization";
  const ValueId scale =
      u.has_input(1) ? fitted(u, u.input(1), normalized) : u.fill(1, {u.dtype(x), normalized});
  std::vector<ValueId> inputs = {x, scale};
  if (centered && u.has_input(2)) {
    inputs.push_back(fitted(u, u.input(2), normalized));
  }
  const std::vector<ValueId> outputs =
      u.emit(centered ? "LayerNormalization" : "RMSNormalization",
             inputs,
             {{"axis", int64_t{axis}}, {"epsilon", u.attributes().get_float("epsilon", 1e-5)}});
  u.set_output(0, outputs[0]);
  // Of ONNX's choice, float32 unless the file says otherwise.
  const DType stash = dtype_from_onnx(u.attributes().get_int("stash_type", 1));
  for (size_t i = 1; i < outputs.size(); ++i) {
    if (u.wants_output(static_cast<int>(i))) {
      u.set_output(static_cast<int>(i), u.cast(outputs[i], stash));
    }
  }
}

OpDef forward_op(const char* name, int num_inputs) {
  OpDef op;
  op.name = name;
  op.infer_types = infer_forward;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 8); };
  op.sharding = sharding;
  op.reference_kernel = forward_reference;
  op.gradient = gradient;
  op.upgrade = upgrade;
  op.cheap = true;
  op.precision = PrecisionRule::kFollow;
  op.cpu_kernel = forward_fast;
  for (const auto& [example, axis] : {std::pair{"last_axis", 2}, std::pair{"two_axes", 1}}) {
    const Shape x = {4, 6, 20};
    const TensorType parameter{DType::kFloat32, {x.begin() + axis, x.end()}};
    TensorTypes inputs(static_cast<size_t>(num_inputs), parameter);
    inputs[0] = {DType::kFloat32, x};
    op.examples.push_back({.name = example,
                           .attributes = {{"axis", int64_t{axis}}, {"epsilon", 1e-5}},
                           .inputs = inputs,
                           .values = {}});
  }
  return op;
}

OpDef grad_op(const char* name, int num_statistics) {
  OpDef op;
  op.name = name;
  op.infer_types = infer_backward;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 12); };
  op.sharding = sharding;
  op.reference_kernel = backward_reference;
  op.inplace = {{0, 0}};
  op.workspace = backward_workspace;
  op.cpu_kernel = backward_fast;
  TensorTypes inputs = {
      {DType::kFloat32, {40, 20}}, {DType::kFloat32, {40, 20}}, {DType::kFloat32, {20}}};
  for (int i = 0; i < num_statistics; ++i) {
    inputs.push_back({DType::kFloat32, {40, 1}});
  }
  op.examples = {
      {.name = "rows", .attributes = {{"axis", int64_t{1}}}, .inputs = inputs, .values = {}}};
  return op;
}

const RegisterOp kLayerNorm{forward_op("LayerNormalization", 3)};
const RegisterOp kLayerNormGrad{grad_op("LayerNormGrad", 2)};
const RegisterOp kRmsNorm{forward_op("RMSNormalization", 2)};
const RegisterOp kRmsNormGrad{grad_op("RMSNormGrad", 1)};
// Exporters write it into the default domain, or into onnxruntime's.
const RegisterUpgrade kSimplified{"SimplifiedLayerNormalization", upgrade};
const RegisterUpgrade kSimplifiedMicrosoft{
    "com.microsoft", "SimplifiedLayerNormalization", upgrade};

}  // namespace

}  // namespace trainrt
