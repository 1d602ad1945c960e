// BatchNorm's running statistics over several data ranks: each rank notes what its micro-batches
// found, and the update folds the notes of all ranks into the running value, in the order of the
// samples, as one device does with RunningAverage (ops/batch_norm).
//
//   StoreRow(rows [n, ...], row [...], micro_batch) -> rows, in place: row of the micro-batch
//   FoldAverage(running [...], rows [n, ...][, grad_scale]) -> running m + row (1 - m), row after
//       row; `running` as it is where grad_scale is not finite: the step is skipped
#include <cmath>
#include <cstring>

#include "graph/op_def.h"

namespace trainrt {

namespace {

std::string inner_dims(const OpContext& op, int rows) {
  std::string dims;
  for (size_t d = 1; d < op.input_shape(rows).size(); ++d) {
    dims += concat(" a", d);
  }
  return dims;
}

void require_rows(const OpContext& op, int rows, int row) {
  Shape shape = op.input_shape(row);
  shape.insert(shape.begin(), op.input_shape(rows).empty() ? 0 : op.input_shape(rows)[0]);
  TRAINRT_REQUIRE(op.input_shape(rows) == shape && op.input_dtype(rows) == op.input_dtype(row),
                  kInvalidModel,
                  op.node().op_type,
                  ": rows are ",
                  shape_string(op.input_shape(rows)),
                  ", one row is ",
                  shape_string(op.input_shape(row)));
}

template <typename T>
void fold_average(KernelContext& k) {
  const T keep = static_cast<T>(k.attributes().get_float("momentum"));
  const int64_t size = num_elements(k.input_shape(0));
  const T* rows = k.input<T>(1);
  T* out = k.output<T>(0);
  std::copy(k.input<T>(0), k.input<T>(0) + size, out);
  if (k.has_input(2) && !std::isfinite(*k.input<double>(2))) {
    return;
  }
  for (int64_t r = 0; r < k.input_shape(1)[0]; ++r) {
    for (int64_t i = 0; i < size; ++i) {
      out[i] = out[i] * keep + rows[r * size + i] * (T(1) - keep);
    }
  }
}

const RegisterOp kStoreRow{{
    .name = "StoreRow",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      require_rows(op, 0, 1);
      return {op.input_type(0)};
    },
    .cost = [](const OpContext& op) -> Cost {
      Cost cost;
      cost.bytes = 2.0 * static_cast<double>(op.input_type(1).bytes());
      return cost;
    },
    .sharding = [](const OpContext& op) -> ShardingRule {
      const std::string dims = inner_dims(op, 0);
      return Factors(op, "n" + dims + "," + dims + ", -> n" + dims).whole("n");
    },
    .reference_kernel =
        [](KernelContext& k) {
          const int64_t bytes = k.input_type(1).bytes();
          std::memcpy(static_cast<std::byte*>(k.raw_output(0)) + *k.input<int64_t>(2) * bytes,
                      k.raw_input(1),
                      static_cast<size_t>(bytes));
        },
    .not_differentiable = true,
    .inplace = {{0, 0, true}},
    .examples =
        {{.name = "second",
          .inputs = {{DType::kFloat32, {3, 6}}, {DType::kFloat32, {6}}, {DType::kInt64, {}}},
          .values = {Tensor(), Tensor(), Tensor::from(std::vector<int64_t>{1}, {})}}},
}};

const RegisterOp kFoldAverage{{
    .name = "FoldAverage",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      require_rows(op, 1, 0);
      TRAINRT_REQUIRE(!op.has_input(2) || op.input_type(2) == (TensorType{DType::kFloat64, {}}),
                      kInvalidModel,
                      "FoldAverage: grad_scale is ",
                      dtype_name(op.input_dtype(2)),
                      shape_string(op.input_shape(2)),
                      ", wanted a float64 scalar");
      return {op.input_type(0)};
    },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op, 3); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      const std::string dims = inner_dims(op, 1);
      return Factors(op, dims + ", n" + dims + (op.num_inputs() > 2 ? ", ->" : " ->") + dims)
          .whole("n");
    },
    .reference_kernel =
        [](KernelContext& k) {
          dispatch_floating(k.input_dtype(0), [&](auto tag) { fold_average<decltype(tag)>(k); });
        },
    .not_differentiable = true,
    .inplace = {{0, 0}},
    .examples =
        {{.name = "three_rows",
          .attributes = {{"momentum", 0.9}},
          .inputs = {{DType::kFloat32, {6}}, {DType::kFloat32, {3, 6}}}},
         {.name = "of_a_finite_step",
          .attributes = {{"momentum", 0.9}},
          .inputs = {{DType::kFloat32, {6}}, {DType::kFloat32, {3, 6}}, {DType::kFloat64, {}}}},
         {.name = "of_a_skipped_step",
          .attributes = {{"momentum", 0.9}},
          .inputs = {{DType::kFloat32, {6}}, {DType::kFloat32, {3, 6}}, {DType::kFloat64, {}}},
          .values = {Tensor(), Tensor(), Tensor::from(std::vector<double>{NAN}, {})}}},
}};

}  // namespace

}  // namespace trainrt
