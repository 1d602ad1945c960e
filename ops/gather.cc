// Gather: rows of `data` along `axis`, picked by integer indices (an embedding), and its gradient,
// which adds the rows of dy up by index.
//
// The gradient first threads a list through the positions of each index (O(rows + indices),
// serial), then every row is summed in order of position in the accumulator type and written once.
// Rows are independent, so the bits depend neither on threads nor on the grain.
//
// Vocabulary-parallel: `axis` is a reduction factor. A shard holds rows [vocab_offset, ... + its
// size) of `vocab_size`, takes indices outside of them for rows of zeros, and the partial results
// add up.
#include "ops/gather.h"

#include <algorithm>
#include <cstring>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/gather_scratch.h"
#include "ops/index_check.h"
#include "ops/localize.h"
#include "ops/strided_copy.h"

namespace trainrt {

namespace {

constexpr int64_t kGrainBytes = 1 << 16;

// The dims around `axis` of a tensor: [outer, rows, inner].
struct RowView {
  int64_t outer, rows, inner;
  RowView(const Shape& shape, int axis)
      : outer(dims_product(shape, 0, axis)),
        rows(shape[static_cast<size_t>(axis)]),
        inner(dims_product(shape, axis + 1, static_cast<int>(shape.size()))) {}
};

// Reads index i as a row of this shard; -1: another shard's.
class IndexReader {
 public:
  IndexReader(const KernelContext& context, int input, int64_t rows)
      : wide_(context.input_dtype(input) == DType::kInt64),
        data_(context.raw_input(input)),
        rows_(rows),
        offset_(context.attributes().get_int("vocab_offset", 0)),
        whole_rows_(context.attributes().get_int("vocab_size", rows)) {
    const int64_t n = num_elements(context.input_shape(input));
    for (int64_t i = 0; i < n; ++i) {
      require_index(context, raw(i), i, whole_rows_);
    }
  }
  int64_t operator()(int64_t i) const {
    int64_t index = raw(i);
    index += (index < 0 ? whole_rows_ : 0) - offset_;
    return index >= 0 && index < rows_ ? index : -1;
  }

 private:
  int64_t raw(int64_t i) const {
    return wide_ ? static_cast<const int64_t*>(data_)[i] : static_cast<const int32_t*>(data_)[i];
  }
  bool wide_;
  const void* data_;
  int64_t rows_, offset_, whole_rows_;
};

void gather_kernel(KernelContext& context) {
  const Shape& shape = context.input_shape(0);
  const int axis =
      normalize_axis(context.attributes().get_int("axis", 0), static_cast<int>(shape.size()));
  const RowView view(shape, axis);
  const IndexReader index(context, 1, view.rows);
  const int64_t num_indices = num_elements(context.input_shape(1));
  const int64_t row_bytes = view.inner * dtype_bytes(context.output_dtype(0));
  const std::byte* data = static_cast<const std::byte*>(context.raw_input(0));
  std::byte* out = static_cast<std::byte*>(context.raw_output(0));
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, row_bytes));
  context.parallel_for(view.outer * num_indices, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = index(i % num_indices);
      std::byte* to = out + i * row_bytes;
      if (row < 0) {
        std::memset(to, 0, static_cast<size_t>(row_bytes));
      } else {
        std::memcpy(to,
                    data + (i / num_indices * view.rows + row) * row_bytes,
                    static_cast<size_t>(row_bytes));
      }
    }
  });
}

// Plain: adds row after row. 16-bit floats lose what the fast kernel keeps.
template <typename T>
void gather_grad_serial(KernelContext& context, const RowView& view, const IndexReader& index) {
  const int64_t num_indices = num_elements(context.input_shape(0));
  const T* dy = context.input<T>(1);
  T* dx = context.output<T>(0);
  std::fill_n(dx, num_elements(context.output_shape(0)), T{});
  for (int64_t o = 0; o < view.outer; ++o) {
    for (int64_t i = 0; i < num_indices; ++i) {
      const int64_t row = index(i);
      for (int64_t j = 0; row >= 0 && j < view.inner; ++j) {
        T& sum = dx[(o * view.rows + row) * view.inner + j];
        sum = T(static_cast<Accumulator<T>>(sum) +
                static_cast<Accumulator<T>>(dy[(o * num_indices + i) * view.inner + j]));
      }
    }
  }
}

template <typename T>
void gather_grad_listed(KernelContext& context, const RowView& view, const IndexReader& index) {
  constexpr int64_t kColumns = 256;
  const int64_t num_indices = num_elements(context.input_shape(0));
  int32_t* head = reinterpret_cast<int32_t*>(context.workspace().data());
  int32_t* next = head + view.rows;
  std::fill_n(head, view.rows, -1);
  for (int64_t i = num_indices; i-- > 0;) {  // backwards: the lists come out ascending
    const int64_t row = index(i);
    if (row >= 0) {
      next[i] = head[row];
      head[row] = static_cast<int32_t>(i);
    }
  }
  const T* dy = context.input<T>(1);
  T* dx = context.output<T>(0);
  const int64_t grain = std::max<int64_t>(
      1, kGrainBytes / std::max<int64_t>(1, view.inner * static_cast<int64_t>(sizeof(T))));
  context.parallel_for(view.outer * view.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int32_t first = head[i % view.rows];
      const int64_t outer = i / view.rows;
      T* to = dx + i * view.inner;
      if (first < 0) {
        std::fill_n(to, view.inner, T{});
        continue;
      }
      for (int64_t column = 0; column < view.inner; column += kColumns) {
        const int64_t width = std::min(kColumns, view.inner - column);
        Accumulator<T> sums[kColumns] = {};
        for (int32_t k = first; k >= 0; k = next[k]) {
          const T* from = dy + (outer * num_indices + k) * view.inner + column;
          for (int64_t j = 0; j < width; ++j) {
            sums[j] += static_cast<Accumulator<T>>(from[j]);
          }
        }
        for (int64_t j = 0; j < width; ++j) {
          to[column + j] = T(sums[j]);
        }
      }
    }
  });
}

template <bool kFast>
void gather_grad_kernel(KernelContext& context) {
  const Shape& shape = context.output_shape(0);
  const int axis =
      normalize_axis(context.attributes().get_int("axis", 0), static_cast<int>(shape.size()));
  const RowView view(shape, axis);
  const IndexReader index(context, 0, view.rows);
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    if constexpr (std::is_integral_v<T>) {
      TRAINRT_FAIL(kUnsupported, "GatherGrad of ", dtype_name(dtype_of<T>));
    } else if constexpr (kFast) {
      gather_grad_listed<T>(context, view, index);
    } else {
      gather_grad_serial<T>(context, view, index);
    }
  });
}

TensorTypes gather_types(const OpContext& op) {
  require_index_dtype(op, 1);
  const int axis = op.axis(0);
  Shape shape = op.input_shape(0);
  const Shape& indices = op.input_shape(1);
  shape.erase(shape.begin() + axis);
  shape.insert(shape.begin() + axis, indices.begin(), indices.end());
  return {{op.input_dtype(0), shape}};
}

// Data dims are a0, a1, ...; index dims i0, i1, ...; the gathered dim is v.
ShardingRule sharding(const OpContext& op, const Shape& data, const Shape& indices, bool grad) {
  const int axis =
      normalize_axis(op.attributes().get_int("axis", 0), static_cast<int>(data.size()));
  ShardingRule rule;
  TensorFactors in_data(data.size()), in_indices(indices.size()), gathered;
  const auto add = [&rule](std::string name, int64_t size, FactorKind kind) {
    rule.factors.push_back({std::move(name), size, kind});
    return static_cast<int>(rule.factors.size()) - 1;
  };
  for (int d = 0; d < static_cast<int>(data.size()); ++d) {
    const size_t dim = static_cast<size_t>(d);
    if (d != axis) {
      in_data[dim] = {add(concat("a", d), data[dim], FactorKind::kParallel)};
      gathered.push_back(in_data[dim]);
      continue;
    }
    // Forward, each shard of v yields a term; backward, each shard of the indices does.
    in_data[dim] = {add("v", data[dim], grad ? FactorKind::kParallel : FactorKind::kReduction)};
    for (size_t i = 0; i < indices.size(); ++i) {
      in_indices[i] = {
          add(concat("i", i), indices[i], grad ? FactorKind::kReduction : FactorKind::kParallel)};
      gathered.push_back(in_indices[i]);
    }
  }
  if (grad) {
    rule.inputs = {in_indices, gathered};
    rule.outputs = {in_data};
    rule.linear = {{1}};
  } else {
    rule.inputs = {in_data, in_indices};
    rule.outputs = {gathered};
    rule.linear = {{0}};
  }
  return rule;
}

// A shard of v needs to know which rows it has.
void localize_rows(const ShardingRule& rule, const FactorShard& shard, Attributes& attributes) {
  if (shard.factor == rule.find("v")) {
    attributes.set("vocab_offset", shard.offset);
    attributes.set("vocab_size", shard.full_size);
  }
}

ShardingRule gather_sharding(const OpContext& op) {
  return sharding(op, op.input_shape(0), op.input_shape(1), false);
}

ShardingRule gather_grad_sharding(const OpContext& op) {
  return sharding(op, op.output_shape(0), op.input_shape(0), true);
}

void gather_gradient(GradientBuilder& g) {
  Attributes attributes = g.attributes();
  attributes.set("axis", attributes.get_int("axis", 0));
  attributes.set("shape", g.input_shape(0));
  g.set_input_grad(0, g.op("GatherGrad", {g.input(1), g.output_grad(0)}, attributes));
}

std::vector<OpExample> gather_examples() {
  return {gather_example("embedding",
                         {7, 24},
                         Tensor::from<int64_t>({0, 6, 3, 3, -1, 2, 0, 0, 1, 5, -7, 4}, {6, 2}),
                         0),
          gather_example("scalar index", {6, 4, 5}, Tensor::scalar<int64_t>(2), 1),
          gather_example("last axis", {6, 9}, Tensor::from<int32_t>({8, 0, -2, 8}, {4}), -1)};
}

OpDef gather_op() {
  OpDef op;
  op.name = "Gather";
  op.infer_types = gather_types;
  op.cost = [](const OpContext& context) {
    Cost cost;
    cost.bytes = 2.0 * static_cast<double>(context.output_bytes()) +
                 static_cast<double>(context.input_type(1).bytes());
    return cost;
  };
  op.sharding = gather_sharding;
  op.localize = [](const OpContext& context, const FactorShard& shard) {
    Attributes attributes = context.attributes();
    localize_rows(gather_sharding(context), shard, attributes);
    return attributes;
  };
  op.gradient = gather_gradient;
  op.upgrade = [](UpgradeContext& context) { context.pass_through(); };
  op.cheap = true;
  op.precision = PrecisionRule::kLowResult;  // gradients of a table are summed in float32
  op.reference_kernel = gather_kernel;
  op.examples = gather_examples();
  return op;
}

OpDef gather_grad_op() {
  OpDef op;
  op.name = "GatherGrad";  // (indices, dy) -> d data
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    require_index_dtype(context, 0);
    return {{context.input_dtype(1), context.attributes().get_ints("shape")}};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context); };
  op.sharding = gather_grad_sharding;
  op.localize = [](const OpContext& context, const FactorShard& shard) {
    Attributes attributes = localize_output_shape(context, shard, "shape");
    localize_rows(gather_grad_sharding(context), shard, attributes);
    return attributes;
  };
  op.workspace = [](const OpContext& context, const DeviceSpec& spec) {
    const Shape& shape = context.output_shape(0);
    const int axis =
        normalize_axis(context.attributes().get_int("axis", 0), static_cast<int>(shape.size()));
    const int64_t rows = shape[static_cast<size_t>(axis)], indices = context.num_elements(0);
    return spec.backend == Backend::kCuda
               ? GatherGradScratch(rows, num_elements(shape), indices).bytes()
               : 4 * (rows + indices);
  };
  op.reference_kernel = gather_grad_kernel<false>;
  op.cpu_kernel = gather_grad_kernel<true>;
  op.gradient = [](GradientBuilder& g) {
    g.set_input_grad(1,
                     g.op("Gather",
                          {g.output_grad(0), g.input(0)},
                          {{"axis", g.attributes().get_int("axis", 0)}}));
  };
  for (OpExample gather : gather_examples()) {
    const Shape data = gather.inputs[0].shape;
    const Tensor indices = gather.values[1];
    const int axis =
        normalize_axis(gather.attributes.get_int("axis"), static_cast<int>(data.size()));
    Shape gathered = data;
    gathered.erase(gathered.begin() + axis);
    gathered.insert(gathered.begin() + axis, indices.shape().begin(), indices.shape().end());
    gather.attributes.set("shape", data);
    gather.inputs = {{indices.dtype(), indices.shape()}, {DType::kFloat32, gathered}};
    gather.values = {indices, {}};
    op.examples.push_back(gather);
  }
  return op;
}

const RegisterOp kGather{gather_op()};
const RegisterOp kGatherGrad{gather_grad_op()};

}  // namespace

}  // namespace trainrt
