// Writing to persistent values as nodes: Accumulate sums gradients over the micro-batches of a
// step, Assign overwrites. Both work in place only.
//
// The first micro-batch of a step overwrites, so nobody clears gradients between steps. Terms are
// added in the order in which micro-batches run, which every schedule keeps.
#include <cstring>

#include "graph/op_def.h"

namespace trainrt {

namespace {

constexpr int64_t kGrain = 16384;

TensorTypes same_types(const OpContext& op) {
  TRAINRT_REQUIRE(op.input_type(0) == op.input_type(1),
                  kInvalidModel,
                  op.node().op_type,
                  ": target is ",
                  dtype_name(op.input_dtype(0)),
                  shape_string(op.input_shape(0)),
                  ", term is ",
                  dtype_name(op.input_dtype(1)),
                  shape_string(op.input_shape(1)));
  return {op.input_type(0)};
}

void accumulate_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T* accumulator = k.input<T>(0);
    const T* term = k.input<T>(1);
    T* out = k.output<T>(0);
    const bool first = k.step().first_micro_batch;
    k.parallel_for(num_elements(k.input_shape(0)), kGrain, [&](int64_t begin, int64_t end) {
      if (first) {
        std::copy(term + begin, term + end, out + begin);
      } else {
        for (int64_t i = begin; i < end; ++i) {
          out[i] = accumulator[i] + term[i];
        }
      }
    });
  });
}

const RegisterOp kAccumulate{{
    .name = "Accumulate",
    .infer_types = same_types,
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      return Factors::elementwise(op).linear({{0, 1}});
    },
    .reference_kernel = accumulate_kernel,
    .not_differentiable = true,
    .inplace = {{0, 0, true}},
    .examples = {{.name = "matrix",
                  .inputs = {{DType::kFloat32, {4, 6}}, {DType::kFloat32, {4, 6}}}}},
}};

const RegisterOp kAssign{{
    .name = "Assign",
    .infer_types = same_types,
    .cost = [](const OpContext& op) -> Cost {
      Cost cost;
      cost.bytes = 2.0 * static_cast<double>(op.output_bytes());
      return cost;
    },
    .sharding = [](const OpContext& op) -> ShardingRule { return Factors::elementwise(op); },
    .reference_kernel =
        [](KernelContext& k) {
          std::memcpy(
              k.raw_output(0), k.raw_input(1), static_cast<size_t>(k.output_type(0).bytes()));
        },
    .not_differentiable = true,
    .inplace = {{0, 0, true}},
    .effect = true,
    .examples = {{.name = "matrix",
                  .inputs = {{DType::kFloat32, {4, 6}}, {DType::kFloat32, {4, 6}}}}},
}};

}  // namespace

}  // namespace trainrt
