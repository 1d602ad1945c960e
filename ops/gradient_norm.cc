// The global norm of the gradients and the factor that clips them, cut so that the bits do not
// depend on how a parameter is split.
//
// RowSquareSums takes fixed blocks of the whole tensor: one float64 sum per index of dim 0, which a
// shard along dim 0 (ZeRO, column-parallel) computes as the whole would. OrderedSum adds the rows
// of a tensor in order, GlobalNorm the tensors in parameter order. Only a shard along another dim
// (row-parallel) leaves partial row sums, summed by a collective.
#include <cmath>

#include "ops/optimizer_kernel.h"

namespace trainrt {

namespace {

template <typename T>
double square_sum(const T* x, int64_t n) {
  double lanes[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < 16; ++j) {
      const double value = static_cast<double>(x[i + j]);
      lanes[j] += value * value;
    }
  }
  for (; i < n; ++i) {
    const double value = static_cast<double>(x[i]);
    lanes[i % 16] += value * value;
  }
  double sum = 0;
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
}

void row_square_sums_kernel(KernelContext& k) {
  const Shape& shape = k.input_shape(0);
  const int64_t rows = shape.empty() ? 1 : shape[0];
  const int64_t width = rows == 0 ? 0 : num_elements(shape) / rows;
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T* x = k.input<T>(0);
    double* sums = k.output<double>(0);
    k.parallel_for(rows,
                   std::max<int64_t>(1, 16384 / std::max<int64_t>(1, width)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       sums[row] = square_sum(x + row * width, width);
                     }
                   });
  });
}

const RegisterOp kRowSquareSums{{
    .name = "RowSquareSums",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      const Shape& shape = op.input_shape(0);
      return {{DType::kFloat64, shape.empty() ? Shape{} : Shape{shape[0]}}};
    },
    .cost = [](const OpContext& op) -> Cost {
      Cost cost = memory_bound_cost(op);
      cost.flops = 2.0 * static_cast<double>(op.num_elements(0));
      return cost;
    },
    .sharding = [](const OpContext& op) -> ShardingRule {
      std::string dims;
      for (size_t d = 0; d < op.input_shape(0).size(); ++d) {
        dims += concat("a", d) + " ";
      }
      Factors factors(op, dims + "->" + (dims.empty() ? "" : "a0"));
      for (size_t d = 1; d < op.input_shape(0).size(); ++d) {
        factors.reduction(concat("a", d));
      }
      return factors;
    },
    .reference_kernel = row_square_sums_kernel,
    .not_differentiable = true,
    .examples = {{.name = "matrix", .inputs = {{DType::kFloat32, {4, 37}}}},
                 {.name = "vector", .inputs = {{DType::kFloat32, {6}}}}},
}};

const RegisterOp kOrderedSum{{
    .name = "OrderedSum",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      TRAINRT_REQUIRE(
          op.input_dtype(0) == DType::kFloat64, kInvalidModel, "OrderedSum wants float64");
      return {{DType::kFloat64, {}}};
    },
    .cost = [](const OpContext& op) -> Cost {
      Cost cost = memory_bound_cost(op);
      cost.flops = static_cast<double>(op.num_elements(0));
      return cost;
    },
    .sharding = [](const OpContext& op) -> ShardingRule { return Factors::whole(op); },
    .reference_kernel =
        [](KernelContext& k) {
          double sum = 0;
          for (int64_t i = 0; i < num_elements(k.input_shape(0)); ++i) {
            sum += k.input<double>(0)[i];
          }
          *k.output<double>(0) = sum;
        },
    .not_differentiable = true,
    .examples = {{.name = "vector", .inputs = {{DType::kFloat64, {6}}}}},
}};

// GlobalNorm(grad_scale, square_sum...): sqrt of the sum, times |grad_scale| (gradients carry the
// loss scale until the update takes it off). float64.
const RegisterOp kGlobalNorm{{
    .name = "GlobalNorm",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      for (int i = 0; i < op.num_inputs(); ++i) {
        TRAINRT_REQUIRE(op.input_shape(i).empty(), kInvalidModel, "GlobalNorm wants scalars");
      }
      return {{DType::kFloat64, {}}};
    },
    .cost = [](const OpContext& op) -> Cost {
      Cost cost = memory_bound_cost(op);
      cost.flops = op.num_inputs();
      return cost;
    },
    .sharding = [](const OpContext& op) -> ShardingRule { return Factors::whole(op); },
    .reference_kernel =
        [](KernelContext& k) {
          double sum = 0;
          for (int i = 1; i < k.num_inputs(); ++i) {
            sum += *k.input<double>(i);
          }
          *k.output<double>(0) = std::sqrt(sum) * std::fabs(optimizer::scalar_input(k, 0));
        },
    .not_differentiable = true,
    .examples = {{.name = "two",
                  .inputs = {{DType::kFloat32, {}}, {DType::kFloat64, {}}, {DType::kFloat64, {}}},
                  .low = 0.5,
                  .high = 1}},
}};

// ClipScale(norm, grad_scale): what optimizers multiply gradients by: grad_scale, times
// clip / (norm + 1e-6) where that is below one (PyTorch's clip_grad_norm_). clip_norm 0 never
// clips. A norm that is not finite gives NaN, at which every optimizer leaves its parameter alone.
const RegisterOp kClipScale{{
    .name = "ClipScale",
    .infer_types = [](const OpContext&) -> TensorTypes {
      return {{DType::kFloat64, {}}};
    },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op, 3); },
    .sharding = [](const OpContext& op) -> ShardingRule { return Factors::whole(op); },
    .reference_kernel =
        [](KernelContext& k) {
          const double norm = *k.input<double>(0);
          const double clip = k.attributes().get_float("clip_norm", 0);
          double scale = optimizer::scalar_input(k, 1);
          if (!std::isfinite(norm)) {
            scale = std::nan("");
          } else if (clip > 0) {
            scale *= std::min(1.0, clip / (norm + 1e-6));
          }
          *k.output<double>(0) = scale;
        },
    .not_differentiable = true,
    .examples = {{.name = "clips",
                  .attributes = {{"clip_norm", 0.5}},
                  .inputs = {{DType::kFloat64, {}}, {DType::kFloat32, {}}},
                  .low = 1,
                  .high = 2}},
}};

}  // namespace

}  // namespace trainrt
