// Dims are merged until kept and reduced ones alternate. The fast walk has two inner loops: along a
// contiguous run when the innermost dim is reduced, and over a block of columns, one accumulator
// each, when it is kept. Work is cut over outputs; where there are few outputs and much to reduce,
// the major-most reduced dim is cut into segments as well, whose partial results lie in the
// workspace and are merged in order. All cuts follow from the shape.
#include "ops/reduce.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "graph/autodiff.h"
#include "graph/passes/layout.h"
#include "ops/broadcast.h"
#include "ops/reduce_segments.h"

namespace trainrt::reduce {

namespace {

constexpr int64_t kGrain = 1 << 15;  // elements per task
constexpr int64_t kFewTasks = 16;    // fewer than this and the reduction itself is cut
constexpr int64_t kMaxSegments = 64;

// Loop nests over the kept and the reduced dims, in input elements. Each ends in a dim of size 1,
// so that RowCursor, which leaves out the innermost dim, walks all of it.
struct Walk {
  BroadcastLoops kept, reduced;  // without `inner`
  bool inner_reduced = true;
  int64_t inner = 1;                      // size of the innermost merged dim
  int64_t num_kept = 1, num_reduced = 1;  // sizes of the nests
  int64_t count = 1;                      // elements per output
  int64_t num_outputs = 1;

  int64_t segments = 1;  // of the reduced nest's rows, or of `inner` when the nest is one row
  int64_t segment_size = 1;
  bool cuts_inner = false;
  int64_t column_blocks = 1;     // blocks of kColumns when the innermost dim is kept
  int64_t outputs_per_task = 1;  // when it is reduced
  int64_t num_tasks = 1;         // without segments
};

void append_dim(BroadcastLoops& loops, int64_t size, int64_t stride) {
  const size_t last = static_cast<size_t>(loops.ndim - 1);
  loops.dims[last] = size;
  loops.strides[0][last] = stride;
  loops.dims[last + 1] = 1;
  loops.strides[0][last + 1] = 0;
  ++loops.ndim;
}

Walk make_walk(const Shape& shape, const std::vector<int64_t>& axes) {
  const Shape strides = row_major_strides(shape);
  Shape kept_strides(shape.size(), 1);  // 1 where kept: only tells kept dims from reduced ones
  int64_t running = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    const bool reduced = std::find(axes.begin(), axes.end(), static_cast<int64_t>(d)) != axes.end();
    kept_strides[d] = reduced ? 0 : running;
    running *= reduced ? 1 : shape[d];
  }
  const std::array<Shape, 2> both = {strides, kept_strides};
  const BroadcastLoops merged = merge_loops(shape, both);
  Walk walk;
  for (BroadcastLoops* loops : {&walk.kept, &walk.reduced}) {
    loops->num_operands = 1;
    loops->dims[0] = 1;
  }
  const int last = merged.ndim - 1;
  walk.inner = merged.inner();
  walk.inner_reduced = merged.inner_stride(1) == 0;
  for (int d = 0; d < last; ++d) {
    const size_t dim = static_cast<size_t>(d);
    const bool reduced = merged.strides[1][dim] == 0;
    append_dim(reduced ? walk.reduced : walk.kept, merged.dims[dim], merged.strides[0][dim]);
    (reduced ? walk.num_reduced : walk.num_kept) *= merged.dims[dim];
  }
  walk.count = walk.num_reduced * (walk.inner_reduced ? walk.inner : 1);
  walk.num_outputs = walk.num_kept * (walk.inner_reduced ? 1 : walk.inner);

  walk.column_blocks = walk.inner_reduced ? 1 : (walk.inner + kColumns - 1) / kColumns;
  if (walk.inner_reduced) {
    const int64_t most = walk.num_outputs / kFewTasks;
    walk.outputs_per_task = std::clamp<int64_t>(
        kGrain / std::max<int64_t>(1, walk.count), 1, std::max<int64_t>(1, most));
    walk.num_tasks = (walk.num_outputs + walk.outputs_per_task - 1) / walk.outputs_per_task;
  } else {
    walk.num_tasks = walk.num_kept * walk.column_blocks;
  }
  walk.cuts_inner = walk.inner_reduced && walk.num_reduced == 1;
  const int64_t cuttable = walk.cuts_inner ? walk.inner : walk.num_reduced;
  const int64_t total = walk.count * walk.num_outputs;
  walk.segment_size = std::max<int64_t>(1, cuttable);
  if (walk.num_tasks < kFewTasks && total > 2 * kGrain) {
    const int64_t wanted = std::min(kMaxSegments, (total + kGrain - 1) / kGrain);
    walk.segment_size = (cuttable + wanted - 1) / wanted;
    walk.segments = (cuttable + walk.segment_size - 1) / walk.segment_size;
  }
  return walk;
}

// Reduces one output (innermost dim reduced) over one segment.
void reduce_row(const Walk& walk,
                const Loops& loops,
                const std::byte* in,
                int64_t output,
                int64_t segment,
                void* accumulator) {
  const RowCursor kept(walk.kept, output);
  const int64_t begin = segment * walk.segment_size;
  if (walk.cuts_inner) {
    const int64_t n = std::min(walk.segment_size, walk.inner - begin);
    loops.row(accumulator, in + (kept.offset(0) + begin) * loops.element_bytes, 1, n);
    return;
  }
  RowCursor reduced(walk.reduced, begin);
  const int64_t end = std::min(walk.num_reduced, begin + walk.segment_size);
  for (int64_t r = begin; r < end; ++r, reduced.next()) {
    loops.row(accumulator,
              in + (kept.offset(0) + reduced.offset(0)) * loops.element_bytes,
              1,
              walk.inner);
  }
}

// Reduces a block of columns (innermost dim kept) over one segment.
void reduce_columns(const Walk& walk,
                    const Loops& loops,
                    const std::byte* in,
                    int64_t kept_row,
                    int64_t column,
                    int64_t width,
                    int64_t segment,
                    void* accumulators) {
  const RowCursor kept(walk.kept, kept_row);
  const int64_t begin = segment * walk.segment_size;
  const int64_t end = std::min(walk.num_reduced, begin + walk.segment_size);
  RowCursor reduced(walk.reduced, begin);
  for (int64_t first = begin; first < end; first += kRows) {
    const int64_t count = std::min(kRows, end - first);
    const void* rows[kRows];
    for (int64_t r = 0; r < count; ++r, reduced.next()) {
      rows[r] = in + (kept.offset(0) + reduced.offset(0) + column) * loops.element_bytes;
    }
    loops.columns(accumulators, rows, count, width);
  }
}

struct Launch {
  const Walk& walk;
  const Loops& loops;
  const std::byte* in;
  std::byte* out;
  std::byte* partial;  // [segments, num_outputs] accumulators
  double count;

  // Where the accumulators of this task go: out, or the segment's partial results.
  void store(int64_t segment, int64_t output, const void* accumulators, int64_t n) const {
    if (walk.segments == 1) {
      loops.finish(accumulators, out + output * loops.element_bytes, n, count);
    } else {
      std::memcpy(partial + (segment * walk.num_outputs + output) * loops.accumulator_bytes,
                  accumulators,
                  static_cast<size_t>(n * loops.accumulator_bytes));
    }
  }

  void run_task(int64_t index) const {
    const int64_t segment = index / walk.num_tasks;
    const int64_t task = index % walk.num_tasks;
    alignas(64) std::byte accumulators[kColumns * kMaxAccumulatorBytes];
    if (walk.inner_reduced) {
      const int64_t first = task * walk.outputs_per_task;
      const int64_t end = std::min(walk.num_outputs, first + walk.outputs_per_task);
      for (int64_t output = first; output < end; ++output) {
        loops.init(accumulators, 1);
        reduce_row(walk, loops, in, output, segment, accumulators);
        store(segment, output, accumulators, 1);
      }
      return;
    }
    const int64_t kept_row = task / walk.column_blocks;
    const int64_t column = task % walk.column_blocks * kColumns;
    const int64_t width = std::min(kColumns, walk.inner - column);
    loops.init(accumulators, width);
    reduce_columns(walk, loops, in, kept_row, column, width, segment, accumulators);
    store(segment, kept_row * walk.inner + column, accumulators, width);
  }

  void merge_segments() const {
    for (int64_t segment = 1; segment < walk.segments; ++segment) {
      loops.merge(partial,
                  partial + segment * walk.num_outputs * loops.accumulator_bytes,
                  walk.num_outputs);
    }
    loops.finish(partial, out, walk.num_outputs, count);
  }
};

std::vector<int64_t> axes_of(const Attributes& attributes, int ndim) {
  std::vector<int64_t> axes;
  for (const int64_t axis : attributes.get_ints("axes")) {
    axes.push_back(normalize_axis(axis, ndim));
  }
  return axes;
}

// What a mean divides by: the shard's own count is not the whole's (see form()).
double divisor(const Attributes& attributes, int64_t count) {
  return static_cast<double>(attributes.get_int("count", count));
}

}  // namespace

void run_reference(KernelContext& context, const Loops& loops) {
  const Shape& shape = context.input_shape(0);
  const Walk walk = make_walk(shape, axes_of(context.attributes(), static_cast<int>(shape.size())));
  const std::byte* in = static_cast<const std::byte*>(context.raw_input(0));
  std::byte* out = static_cast<std::byte*>(context.raw_output(0));
  const int64_t kept_inner = walk.inner_reduced ? 1 : walk.inner;
  const int64_t reduced_inner = walk.inner_reduced ? walk.inner : 1;
  for (int64_t output = 0; output < walk.num_outputs; ++output) {
    alignas(16) std::byte accumulator[kMaxAccumulatorBytes];
    loops.init(accumulator, 1);
    const RowCursor kept(walk.kept, output / kept_inner);
    RowCursor reduced(walk.reduced, 0);
    for (int64_t r = 0; r < walk.num_reduced; ++r, reduced.next()) {
      const int64_t offset = kept.offset(0) + output % kept_inner + reduced.offset(0);
      for (int64_t i = 0; i < reduced_inner; ++i) {
        const void* element = in + (offset + i) * loops.element_bytes;
        loops.columns(accumulator, &element, 1, 1);
      }
    }
    loops.finish(accumulator,
                 out + output * loops.element_bytes,
                 1,
                 divisor(context.attributes(), walk.count));
  }
}

void run_fast(KernelContext& context, const Loops& loops) {
  const Shape& shape = context.input_shape(0);
  const Walk walk = make_walk(shape, axes_of(context.attributes(), static_cast<int>(shape.size())));
  const Launch launch{walk,
                      loops,
                      static_cast<const std::byte*>(context.raw_input(0)),
                      static_cast<std::byte*>(context.raw_output(0)),
                      context.workspace().data(),
                      divisor(context.attributes(), walk.count)};
  // A task of few elements is not worth its hand-over.
  const int64_t task_elements =
      walk.count * walk.num_outputs / std::max<int64_t>(1, walk.num_tasks * walk.segments);
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, task_elements));
  context.parallel_for(
      walk.num_tasks * walk.segments, grain, [&launch](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          launch.run_task(task);
        }
      });
  if (walk.segments > 1) {
    launch.merge_segments();
  }
}

namespace {

int64_t workspace(const OpContext& op, const DeviceSpec& spec) {
  const Shape& shape = op.input_shape(0);
  const Walk walk = make_walk(shape, axes_of(op.attributes(), static_cast<int>(shape.size())));
  const int64_t segments = spec.backend == Backend::kCuda
                               ? device_segments(walk.num_outputs, walk.count, !walk.inner_reduced)
                               : walk.segments;
  return segments > 1 ? segments * walk.num_outputs * kMaxAccumulatorBytes : 0;
}

TensorTypes types(const OpContext& op) {
  Shape shape = op.input_shape(0);
  const std::vector<int64_t> axes = axes_of(op.attributes(), static_cast<int>(shape.size()));
  const bool keep = op.attributes().get_int("keepdims", 1) != 0;
  TRAINRT_REQUIRE(is_floating(op.input_dtype(0)) || is_integer(op.input_dtype(0)),
                  kInvalidModel,
                  op.node().op_type,
                  " of ",
                  dtype_name(op.input_dtype(0)));
  for (const int64_t axis : axes) {
    TRAINRT_REQUIRE(
        shape[static_cast<size_t>(axis)] >= 0, kInvalidModel, "axis ", axis, " is reduced twice");
    shape[static_cast<size_t>(axis)] = keep ? 1 : -1;
  }
  if (!keep) {
    shape.erase(std::remove(shape.begin(), shape.end(), int64_t{-1}), shape.end());
  }
  return {{op.input_dtype(0), shape}};
}

ShardingRule sharding(const OpContext& op, bool sharded, ReductionKind kind) {
  const Shape& shape = op.input_shape(0);
  const std::vector<int64_t> axes = axes_of(op.attributes(), static_cast<int>(shape.size()));
  const bool keep = op.attributes().get_int("keepdims", 1) != 0;
  ShardingRule rule;
  TensorFactors in, out;
  for (size_t d = 0; d < shape.size(); ++d) {
    const int factor = static_cast<int>(d);
    const bool reduced = std::find(axes.begin(), axes.end(), static_cast<int64_t>(d)) != axes.end();
    const FactorKind reduced_kind = sharded ? FactorKind::kReduction : FactorKind::kWhole;
    rule.factors.push_back(
        {concat("d", d), shape[d], reduced ? reduced_kind : FactorKind::kParallel, kind});
    in.push_back({factor});
    if (!reduced) {
      out.push_back({factor});
    } else if (keep) {
      out.emplace_back();
    }
  }
  rule.inputs = {in};
  rule.outputs = {out};
  return rule;
}

// With noop_with_empty_axes and no axes only the element-wise part of the operator remains.
void upgrade(UpgradeContext& context) {
  const ValueId input = context.input(0);
  const int64_t keepdims = context.attributes().get_int("keepdims", 1);
  const int ndim = context.ndim(input);
  const std::vector<int64_t> axes = reduced_axes(context);
  if (axes.empty() && ndim > 0) {
    // A reduction over a new dim of size 1 is that element-wise part.
    Shape shape = context.shape(input);
    shape.push_back(1);
    context.set_outputs(
        context.emit(context.op_type(),
                     {context.reshape(input, shape)},
                     {{"axes", std::vector<int64_t>{ndim}}, {"keepdims", int64_t{0}}}));
    return;
  }
  context.set_outputs(
      context.emit(context.op_type(), {input}, {{"axes", axes}, {"keepdims", keepdims}}));
}

}  // namespace

std::vector<int64_t> reduced_axes(UpgradeContext& context) {
  const Attributes& attributes = context.attributes();
  const int ndim = context.ndim(context.input(0));
  std::vector<int64_t> axes =
      context.has_input(1) ? context.int_input(1) : attributes.get_ints("axes", {});
  if (axes.empty() && attributes.get_int("noop_with_empty_axes", 0) == 0) {
    axes.resize(static_cast<size_t>(ndim));
    std::iota(axes.begin(), axes.end(), int64_t{0});
  }
  for (int64_t& axis : axes) {
    axis = normalize_axis(axis, ndim);
  }
  std::sort(axes.begin(), axes.end());
  return axes;
}

OpDef form(std::string name, bool sharded, ReductionKind kind) {
  OpDef op;
  op.name = std::move(name);
  op.infer_types = types;
  op.cost = [](const OpContext& context) {
    Cost cost = memory_bound_cost(context);
    cost.flops = static_cast<double>(context.num_elements(0));
    return cost;
  };
  op.sharding = [sharded, kind](const OpContext& context) {
    return reduce::sharding(context, sharded, kind);
  };
  op.workspace = workspace;
  op.upgrade = upgrade;
  op.cheap = true;
  RegisterImageRule(op.name, {ImageForm::kAxes});
  return op;
}

std::vector<OpExample> examples(double low, double high) {
  const auto example = [&](std::string name, Shape shape, std::vector<int64_t> axes, int64_t keep) {
    OpExample reduction;
    reduction.name = std::move(name);
    reduction.attributes = {{"axes", std::move(axes)}, {"keepdims", keep}};
    reduction.inputs = {{DType::kFloat32, std::move(shape)}};
    reduction.low = low;
    reduction.high = high;
    return reduction;
  };
  return {example("last axis", {6, 40}, {1}, 1),
          example("first axis", {12, 6}, {0}, 0),
          example("batch and space", {4, 6, 20}, {0, 2}, 0),
          example("middle axis", {4, 6, 7}, {-2}, 1),
          example("everything", {4, 6, 5}, {0, 1, 2}, 0)};
}

ValueId keep_dims(GradientBuilder& g, ValueId reduced) {
  Shape shape = g.input_shape(0);
  for (const int64_t axis : g.attributes().get_ints("axes")) {
    shape[static_cast<size_t>(normalize_axis(axis, static_cast<int>(shape.size())))] = 1;
  }
  return g.reshape(reduced, shape);
}

}  // namespace trainrt::reduce
