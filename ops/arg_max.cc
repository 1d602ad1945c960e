// ArgMax and ArgMin along `axis`: int64 positions, of the first extremum or (select_last_index) the
// last. And TopK: the k largest or smallest elements with their positions, sorted, ties by
// position.
#include <algorithm>
#include <numeric>

#include "graph/autodiff.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/int_scalar.h"

namespace trainrt {

namespace {

constexpr int64_t kGrain = 1 << 14;

// A tensor seen as [outer, n, inner] around an axis.
struct Lines {
  int64_t outer, n, inner;
  Lines(const Shape& shape, int axis)
      : outer(dims_product(shape, 0, axis)),
        n(shape[static_cast<size_t>(axis)]),
        inner(dims_product(shape, axis + 1, static_cast<int>(shape.size()))) {}
  int64_t count() const { return outer * inner; }
  int64_t grain() const { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, n)); }
  // Offset of element 0 of a line in a tensor that has `size` elements along the axis.
  int64_t begin(int64_t line, int64_t size) const {
    return line / inner * size * inner + line % inner;
  }
};

int axis_of(const KernelContext& context, int64_t fallback) {
  return normalize_axis(context.attributes().get_int("axis", fallback),
                        static_cast<int>(context.input_shape(0).size()));
}

// NaN counts as larger than everything, as in NumPy and PyTorch.
template <typename T>
bool greater(T a, T b) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return greater(static_cast<float>(a), static_cast<float>(b));
  } else {
    return a > b || (a != a && b == b);
  }
}

template <bool kMax>
void arg_kernel(KernelContext& context) {
  const Lines lines(context.input_shape(0), axis_of(context, 0));
  const bool last = context.attributes().get_int("select_last_index", 0) != 0;
  int64_t* out = context.output<int64_t>(0);
  dispatch_all(context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T* x = context.input<T>(0);
    context.parallel_for(lines.count(), lines.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t line = begin; line < end; ++line) {
        const T* from = x + lines.begin(line, lines.n);
        int64_t best = 0;
        for (int64_t i = 1; i < lines.n; ++i) {
          const T a = from[i * lines.inner], b = from[best * lines.inner];
          const bool better = kMax ? greater(a, b) : greater(b, a);
          const bool worse = kMax ? greater(b, a) : greater(a, b);
          best = better || (last && !worse) ? i : best;
        }
        out[lines.begin(line, 1)] = best;
      }
    });
  });
}

TensorTypes arg_types(const OpContext& op) {
  Shape shape = op.input_shape(0);
  const int axis = op.axis(0);
  TRAINRT_REQUIRE(shape[static_cast<size_t>(axis)] > 0,
                  kInvalidModel,
                  op.node().op_type,
                  " along an axis without elements");
  if (op.attributes().get_int("keepdims", 1) != 0) {
    shape[static_cast<size_t>(axis)] = 1;
  } else {
    shape.erase(shape.begin() + axis);
  }
  return {{DType::kInt64, shape}};
}

ShardingRule lines_sharding(const OpContext& op, bool drops_axis) {
  const Shape& shape = op.input_shape(0);
  const int axis = op.axis(op.node().op_type == "TopK" ? -1 : 0);
  ShardingRule rule;
  TensorFactors in, out;
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    if (d != axis) {
      in.push_back({static_cast<int>(rule.factors.size())});
      out.push_back(in.back());
      rule.factors.push_back({concat("d", d), shape[static_cast<size_t>(d)]});
    } else {
      in.emplace_back();
      if (!drops_axis) {
        out.emplace_back();
      }
    }
  }
  rule.inputs = {in};
  rule.outputs.assign(static_cast<size_t>(op.num_outputs()), out);
  return rule;
}

template <bool kMax>
OpDef arg_op(const char* name) {
  OpDef op;
  op.name = name;
  op.infer_types = arg_types;
  op.cost = [](const OpContext& context) { return memory_bound_cost(context); };
  op.sharding = [](const OpContext& context) {
    return lines_sharding(context, context.attributes().get_int("keepdims", 1) == 0);
  };
  op.not_differentiable = true;
  op.upgrade = [](UpgradeContext& context) { context.pass_through(); };
  op.reference_kernel = arg_kernel<kMax>;
  OpExample classes;
  classes.name = "classes";
  classes.attributes = {{"axis", int64_t{-1}}, {"keepdims", int64_t{0}}};
  classes.inputs = {{DType::kFloat32, {6, 35}}};
  OpExample middle;
  middle.name = "middle axis, last of equals";
  middle.attributes = {{"axis", int64_t{1}}, {"select_last_index", int64_t{1}}};
  middle.inputs = {{DType::kInt64, {4, 9, 6}}};
  op.examples = {classes, middle};
  return op;
}

// One element after the other: each is the best of those that come after the previous one. k is
// small, and nothing need be kept of a line when nobody asks for positions.
void top_k_kernel(KernelContext& context) {
  const Lines lines(context.input_shape(0), axis_of(context, -1));
  const int64_t k = context.attributes().get_int("k");
  const bool largest = context.attributes().get_int("largest", 1) != 0;
  int64_t* positions = context.output<int64_t>(1);
  dispatch_all(context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T* x = context.input<T>(0);
    T* values = context.output<T>(0);
    context.parallel_for(lines.count(), lines.grain(), [&](int64_t begin, int64_t end) {
      for (int64_t line = begin; line < end; ++line) {
        const T* from = x + lines.begin(line, lines.n);
        const int64_t to = lines.begin(line, k);
        const auto before = [&](int64_t a, int64_t b) {
          const T u = from[a * lines.inner], v = from[b * lines.inner];
          const bool first = largest ? greater(u, v) : greater(v, u);
          const bool second = largest ? greater(v, u) : greater(u, v);
          return first || (!second && a < b);
        };
        for (int64_t j = 0, previous = -1; j < k; ++j) {
          int64_t best = -1;
          for (int64_t i = 0; i < lines.n; ++i) {
            if ((previous < 0 || before(previous, i)) && (best < 0 || before(i, best))) {
              best = i;
            }
          }
          values[to + j * lines.inner] = from[best * lines.inner];
          if (positions != nullptr) {
            positions[to + j * lines.inner] = best;
          }
          previous = best;
        }
      }
    });
  });
}

void upgrade_top_k(UpgradeContext& context) {
  const int64_t k =
      context.opset() < 10 ? context.attributes().get_int("k") : int_scalar(context, 1);
  context.set_outputs(context.emit("TopK",
                                   {context.input(0)},
                                   {{"k", k},
                                    {"axis", context.attributes().get_int("axis", -1)},
                                    {"largest", context.attributes().get_int("largest", 1)}}));
}

// dy goes back to where the values came from.
void top_k_gradient(GradientBuilder& g) {
  if (g.output_grad(0) == kNoValue) {
    return;
  }
  g.set_input_grad(0,
                   g.op("ScatterElements",
                        {g.zeros_like(g.input(0)), g.saved_output(1), g.output_grad(0)},
                        {{"axis", g.attributes().get_int("axis", -1)}}));
}

OpDef top_k_op() {
  OpDef op;
  op.name = "TopK";
  op.infer_types = [](const OpContext& context) -> TensorTypes {
    Shape shape = context.input_shape(0);
    const int64_t k = context.attributes().get_int("k");
    int64_t& dim = shape[static_cast<size_t>(context.axis())];
    TRAINRT_REQUIRE(k >= 0 && k <= dim, kInvalidModel, "TopK wants ", k, " of ", dim, " elements");
    dim = k;
    return {{context.input_dtype(0), shape}, {DType::kInt64, shape}};
  };
  op.cost = [](const OpContext& context) { return memory_bound_cost(context, 10); };
  op.sharding = [](const OpContext& context) { return lines_sharding(context, false); };
  op.gradient = top_k_gradient;
  op.upgrade = upgrade_top_k;
  op.reference_kernel = top_k_kernel;
  OpExample largest;
  largest.name = "largest";
  largest.attributes = {{"k", int64_t{3}}};
  largest.inputs = {{DType::kFloat32, {6, 20}}};
  OpExample smallest;
  smallest.name = "smallest along the first axis";
  smallest.attributes = {{"k", int64_t{2}}, {"axis", int64_t{0}}, {"largest", int64_t{0}}};
  smallest.inputs = {{DType::kFloat32, {7, 6}}};
  op.examples = {largest, smallest};
  return op;
}

const RegisterOp kArgMax{arg_op<true>("ArgMax")};
const RegisterOp kArgMin{arg_op<false>("ArgMin")};
const RegisterOp kTopK{top_k_op()};

}  // namespace

}  // namespace trainrt
