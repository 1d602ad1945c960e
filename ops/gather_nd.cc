// GatherND: y[b, i] = data[b][indices[b, i]], an index being a tuple of coordinates, and ScatterND,
// which writes (reduction none) or combines (add, mul, max, min) slices there. Each is the other's
// gradient; that of GatherND with batch_dims goes through indices extended by the batch
// coordinates.
//
// Slices that meet are combined in order of index: ScatterND runs over columns in parallel, over
// indices in order.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/device_sort.h"
#include "ops/index_check.h"
#include "ops/scatter_gradient.h"
#include "ops/strided_copy.h"

namespace trainrt {

namespace {

constexpr int64_t kGrainBytes = 1 << 16;

// How the tuples of `indices` address slices of `data`.
struct Addressing {
  Shape data;
  int64_t batches = 1;         // leading dims shared by data and indices
  int64_t tuples = 1;          // index tuples per batch
  int64_t width = 0;           // coordinates per tuple
  int64_t slice = 1;           // elements per slice
  int64_t batch_elements = 1;  // of data
  int batch_dims = 0;

  Addressing(const Shape& data_shape, const Shape& indices, int num_batch_dims)
      : data(data_shape), batch_dims(num_batch_dims) {
    width = indices.back();
    const int first = batch_dims + static_cast<int>(width);
    const int ndim = static_cast<int>(data.size());
    batches = dims_product(data, 0, batch_dims);
    tuples = dims_product(indices, batch_dims, static_cast<int>(indices.size()) - 1);
    slice = dims_product(data, first, ndim);
    batch_elements = dims_product(data, batch_dims, ndim);
  }

  // Offset in data of tuple t (counted over all batches).
  int64_t offset(const int64_t* indices, int64_t t) const {
    int64_t at = 0;
    for (int64_t c = 0; c < width; ++c) {
      const int64_t dim = data[static_cast<size_t>(batch_dims + c)];
      const int64_t index = indices[t * width + c];
      at = at * dim + (index < 0 ? index + dim : index);
    }
    return t / tuples * batch_elements + at * slice;
  }

  void require_in_range(const KernelContext& context, const int64_t* indices) const {
    for (int64_t i = 0; i < batches * tuples * width; ++i) {
      require_index(context, indices[i], i, data[static_cast<size_t>(batch_dims + i % width)]);
    }
  }
};

int batch_dims_of(const Attributes& attributes) {
  return static_cast<int>(attributes.get_int("batch_dims", 0));
}

void gather_nd_kernel(KernelContext& context) {
  const Addressing addressing(
      context.input_shape(0), context.input_shape(1), batch_dims_of(context.attributes()));
  const int64_t* indices = context.input<int64_t>(1);
  addressing.require_in_range(context, indices);
  const int64_t bytes = dtype_bytes(context.output_dtype(0));
  const int64_t slice_bytes = addressing.slice * bytes;
  const std::byte* data = static_cast<const std::byte*>(context.raw_input(0));
  std::byte* out = static_cast<std::byte*>(context.raw_output(0));
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, slice_bytes));
  context.parallel_for(
      addressing.batches * addressing.tuples, grain, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          std::memcpy(out + t * slice_bytes,
                      data + addressing.offset(indices, t) * bytes,
                      static_cast<size_t>(slice_bytes));
        }
      });
}

template <typename T, typename Fn>
void combine_slices(KernelContext& context, const Addressing& addressing, Fn fn) {
  constexpr int64_t kColumns = 1024;
  const int64_t* indices = context.input<int64_t>(1);
  const T* updates = context.input<T>(2);
  T* out = context.output<T>(0);
  context.parallel_for(addressing.slice, kColumns, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < addressing.tuples; ++t) {
      T* to = out + addressing.offset(indices, t);
      const T* from = updates + t * addressing.slice;
      for (int64_t j = begin; j < end; ++j) {
        to[j] = fn(to[j], from[j]);
      }
    }
  });
}

void scatter_nd_kernel(KernelContext& context) {
  copy_kernel(context);
  const Addressing addressing(context.input_shape(0), context.input_shape(1), 0);
  addressing.require_in_range(context, context.input<int64_t>(1));
  const std::string how = context.attributes().get_string("reduction", "none");
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    if (how == "none") {
      return combine_slices<T>(context, addressing, [](T, T b) { return b; });
    }
    if constexpr (std::is_arithmetic_v<T> && !std::is_same_v<T, bool>) {
      if (how == "add") {
        return combine_slices<T>(
            context, addressing, [](T a, T b) { return static_cast<T>(a + b); });
      }
      if (how == "mul") {
        return combine_slices<T>(
            context, addressing, [](T a, T b) { return static_cast<T>(a * b); });
      }
      if (how == "max") {
        return combine_slices<T>(context, addressing, [](T a, T b) { return b > a ? b : a; });
      }
      if (how == "min") {
        return combine_slices<T>(context, addressing, [](T a, T b) { return b < a ? b : a; });
      }
    }
    TRAINRT_FAIL(
        kUnsupported, "ScatterND of ", dtype_name(dtype_of<T>), " with reduction '", how, "'");
  });
}

TensorTypes gather_nd_types(const OpContext& op) {
  const Shape& data = op.input_shape(0);
  const Shape& indices = op.input_shape(1);
  const int batch_dims = batch_dims_of(op.attributes());
  TRAINRT_REQUIRE(op.input_dtype(1) == DType::kInt64 && !indices.empty() && batch_dims >= 0 &&
                      batch_dims < static_cast<int>(indices.size()) &&
                      batch_dims + indices.back() <= static_cast<int64_t>(data.size()),
                  kInvalidModel,
                  "GatherND of ",
                  shape_string(data),
                  " by ",
                  dtype_name(op.input_dtype(1)),
                  shape_string(indices),
                  " with ",
                  batch_dims,
                  " batch dims");
  TRAINRT_REQUIRE(std::equal(data.begin(), data.begin() + batch_dims, indices.begin()),
                  kInvalidModel,
                  "data ",
                  shape_string(data),
                  " and indices ",
                  shape_string(indices),
                  " differ in their first ",
                  batch_dims,
                  " dims, the batch dims; wanted the same");
  Shape shape(indices.begin(), indices.end() - 1);
  shape.insert(shape.end(), data.begin() + batch_dims + indices.back(), data.end());
  return {{op.input_dtype(0), shape}};
}

// Batch dims and slice dims are parallel factors; so are the tuples of a GatherND.
ShardingRule gather_nd_sharding(const OpContext& op) {
  const Shape& data = op.input_shape(0);
  const Shape& indices = op.input_shape(1);
  const size_t batch_dims = static_cast<size_t>(batch_dims_of(op.attributes()));
  ShardingRule rule;
  TensorFactors in_data(data.size()), in_indices(indices.size()), out;
  const auto add = [&rule](std::string name, int64_t size) {
    rule.factors.push_back({std::move(name), size});
    return static_cast<int>(rule.factors.size()) - 1;
  };
  for (size_t d = 0; d + 1 < indices.size(); ++d) {
    in_indices[d] = {add(concat("i", d), indices[d])};
    if (d < batch_dims) {
      in_data[d] = in_indices[d];
    }
    out.push_back(in_indices[d]);
  }
  for (size_t d = batch_dims + static_cast<size_t>(indices.back()); d < data.size(); ++d) {
    in_data[d] = {add(concat("a", d), data[d])};
    out.push_back(in_data[d]);
  }
  rule.inputs = {in_data, in_indices};
  rule.outputs = {out};
  rule.linear = {{0}};
  return rule;
}

// Only the dims of a slice: an update may go anywhere in the others.
ShardingRule scatter_nd_sharding(const OpContext& op) {
  const Shape& data = op.input_shape(0);
  const Shape& indices = op.input_shape(1);
  ShardingRule rule;
  TensorFactors in_data(data.size()), in_updates(op.input_shape(2).size());
  for (size_t d = static_cast<size_t>(indices.back()); d < data.size(); ++d) {
    in_data[d] = {static_cast<int>(rule.factors.size())};
    in_updates[in_updates.size() - (data.size() - d)] = in_data[d];
    rule.factors.push_back({concat("a", d), data[d]});
  }
  rule.inputs = {in_data, TensorFactors(indices.size()), in_updates};
  rule.outputs = {in_data};
  const std::string how = op.attributes().get_string("reduction", "none");
  if (how == "none" || how == "add") {
    rule.linear = {{0, 2}};
  }
  return rule;
}

void gather_nd_gradient(GradientBuilder& g) {
  const int batch_dims = batch_dims_of(g.attributes());
  const Shape shape = g.shape(g.input(1));
  ValueId indices = g.input(1);
  if (batch_dims > 0) {
    // Prepend the batch coordinates to every tuple.
    std::vector<ValueId> parts;
    Shape column = shape;
    column.back() = 1;
    for (int d = 0; d < batch_dims; ++d) {
      const int64_t size = shape[static_cast<size_t>(d)];
      std::vector<int64_t> counted(static_cast<size_t>(size));
      std::iota(counted.begin(), counted.end(), int64_t{0});
      Shape dims(shape.size(), 1);
      dims[static_cast<size_t>(d)] = size;
      parts.push_back(g.expand(g.constant(Tensor::from(counted, dims)), column));
    }
    parts.push_back(indices);
    indices = g.op("Concat", parts, {{"axis", static_cast<int64_t>(shape.size()) - 1}});
  }
  g.set_input_grad(0,
                   g.op("ScatterND",
                        {g.zeros_like(g.input(0)), indices, g.output_grad(0)},
                        {{"reduction", std::string("add")}}));
}

void scatter_nd_gradient(GradientBuilder& g) {
  const ValueId indices = g.input(1);
  scatter_gradient(
      g,
      {.gather =
           [&](ValueId from) {
             return g.op("GatherND", {from, indices});
           },
       .scatter =
           [&](ValueId data, ValueId updates, const std::string& reduction) {
             return g.op("ScatterND", {data, indices, updates}, {{"reduction", reduction}});
           }});
}

OpExample gather_example() {
  OpExample example;
  example.name = "rows of a matrix of vectors";
  example.inputs = {{DType::kFloat32, {3, 4, 6}}, {DType::kInt64, {5, 2}}};
  example.values = {{}, Tensor::from<int64_t>({0, 0, 2, -1, 1, 1, 0, 0, 2, 3}, {5, 2})};
  return example;
}

OpDef gather_nd_op() {
  OpDef op;
  op.name = "GatherND";
  op.infer_types = gather_nd_types;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = gather_nd_sharding;
  op.gradient = gather_nd_gradient;
  op.upgrade = [](UpgradeContext& context) { context.pass_through(); };
  op.cheap = true;
  op.reference_kernel = gather_nd_kernel;
  OpExample batched;
  batched.name = "batch dims";
  batched.attributes = {{"batch_dims", int64_t{1}}};
  batched.inputs = {{DType::kFloat32, {4, 5, 6}}, {DType::kInt64, {4, 2, 1}}};
  batched.values = {{}, Tensor::from<int64_t>({0, 4, 1, 1, -2, 0, 3, 2}, {4, 2, 1})};
  op.examples = {gather_example(), batched};
  return op;
}

OpDef scatter_nd_op() {
  OpDef op;
  op.name = "ScatterND";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    TRAINRT_REQUIRE(context.num_inputs() == 3 && context.input_dtype(1) == DType::kInt64 &&
                        context.input_dtype(0) == context.input_dtype(2),
                    kInvalidModel,
                    "ScatterND takes data, int64 indices and updates like data");
    const Shape& data = context.input_shape(0);
    const Shape& indices = context.input_shape(1);
    TRAINRT_REQUIRE(!indices.empty() && indices.back() <= static_cast<int64_t>(data.size()),
                    kInvalidModel,
                    "ScatterND into ",
                    shape_string(data),
                    " by indices ",
                    shape_string(indices),
                    "; wanted [..., k] with k <= ",
                    data.size());
    Shape updates(indices.begin(), indices.end() - 1);
    updates.insert(updates.end(), data.begin() + indices.back(), data.end());
    TRAINRT_REQUIRE(updates == context.input_shape(2),
                    kInvalidModel,
                    "updates must be ",
                    shape_string(updates),
                    ", got ",
                    shape_string(context.input_shape(2)));
    return {context.input_type(0)};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 0); };
  op.sharding = scatter_nd_sharding;
  op.gradient = scatter_nd_gradient;
  op.upgrade = [](UpgradeContext& context) { context.pass_through(); };
  op.inplace = {{0, 0}};
  op.cheap = true;
  op.workspace = [](const OpContext& context, const DeviceSpec& spec) {
    const Shape& indices = context.input_shape(1);
    const int64_t tuples = dims_product(indices, 0, static_cast<int>(indices.size()) - 1);
    return spec.backend == Backend::kCuda ? device_sort::bytes(tuples) : 0;
  };
  op.reference_kernel = scatter_nd_kernel;
  OpExample add = gather_example();
  add.name = "add";
  add.attributes = {{"reduction", std::string("add")}};
  add.inputs.push_back({DType::kFloat32, {5, 6}});
  OpExample write = add;
  write.name = "write";
  write.attributes = {};
  write.values = {{}, Tensor::from<int64_t>({0, 0, 2, -1, 1, 1, 0, 1, 2, 2}, {5, 2})};
  op.examples = {add, write};
  for (const std::string reduction : {"mul", "max", "min"}) {
    OpExample combined = add;
    combined.name = reduction;
    combined.attributes.set("reduction", reduction);
    op.examples.push_back(combined);
  }
  return op;
}

const RegisterOp kGatherND{gather_nd_op()};
const RegisterOp kScatterND{scatter_nd_op()};

}  // namespace

}  // namespace trainrt
