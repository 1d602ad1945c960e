// Losses that compare element by element, summed in float64: squared and absolute error, and binary
// cross-entropy from logits, max(x, 0) - x t + log(1 + exp(-|x|)), which is PyTorch's stable form.
// Gradients: 2 (x - t), sign(x - t) (0 where equal) and sigmoid(x) - t.
#include "ops/element_loss.h"

#include "graph/autodiff.h"
#include "graph/op_def.h"

namespace trainrt {

namespace {

template <typename Fn>
void dispatch_kind(const Attributes& attributes, Fn&& fn) {
  const std::string& kind = attributes.get_string("kind");
  if (kind == "squared") {
    fn(SquaredError{});
  } else if (kind == "absolute") {
    fn(AbsoluteError{});
  } else if (kind == "bce_with_logits") {
    fn(BceWithLogits{});
  } else {
    TRAINRT_FAIL(kInternal, "element loss of kind '", kind, "'");
  }
}

template <typename Loss, typename T>
double block_loss(const T* x, const T* t, int64_t begin, int64_t end) {
  double sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    sum += static_cast<double>(Loss::loss(x[i], t[i]));
  }
  return sum;
}

void element_loss_kernel(KernelContext& k) {
  const int64_t n = num_elements(k.input_shape(0));
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    dispatch_kind(k.attributes(), [&](auto loss) {
      using T = decltype(tag);
      using Loss = decltype(loss);
      const T* x = k.input<T>(0);
      const T* t = k.input<T>(1);
      if (k.workspace().empty()) {  // the reference kernel: one block
        *k.output<double>(0) = block_loss<Loss>(x, t, 0, n);
        return;
      }
      double* blocks = reinterpret_cast<double*>(k.workspace().data());
      k.parallel_for(n, kElementLossBlock, [&](int64_t begin, int64_t end) {
        blocks[begin / kElementLossBlock] = block_loss<Loss>(x, t, begin, end);
      });
      double sum = 0;
      for (int64_t block = 0; block * kElementLossBlock < n; ++block) {
        sum += blocks[block];
      }
      *k.output<double>(0) = sum;
    });
  });
}

void element_loss_grad_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    dispatch_kind(k.attributes(), [&](auto loss) {
      using T = decltype(tag);
      using Loss = decltype(loss);
      const T* x = k.input<T>(0);
      const T* t = k.input<T>(1);
      const T upstream = static_cast<T>(*k.input<double>(2));
      T* grad = k.output<T>(0);
      k.parallel_for(
          num_elements(k.input_shape(0)), kElementLossBlock, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
              grad[i] = Loss::slope(x[i], t[i]) * upstream;
            }
          });
    });
  });
}

std::string dims(const OpContext& op) {
  std::string text;
  for (size_t d = 0; d < op.input_shape(0).size(); ++d) {
    text += concat("a", d) + " ";
  }
  return text;
}

void same_types(const OpContext& op) {
  TRAINRT_REQUIRE(op.input_type(0) == op.input_type(1),
                  kInvalidModel,
                  op.node().op_type,
                  ": output is ",
                  dtype_name(op.input_dtype(0)),
                  shape_string(op.input_shape(0)),
                  ", targets are ",
                  dtype_name(op.input_dtype(1)),
                  shape_string(op.input_shape(1)),
                  "; they must agree");
}

OpExample example(const char* kind) {
  return {.name = kind,
          .attributes = {{"kind", std::string(kind)}},
          .inputs = {{DType::kFloat32, {4, 6}}, {DType::kFloat32, {4, 6}}},
          .check_gradient = {0}};
}

OpExample grad_example(const char* kind) {
  return {.name = kind,
          .attributes = {{"kind", std::string(kind)}},
          .inputs = {{DType::kFloat32, {4, 6}}, {DType::kFloat32, {4, 6}}, {DType::kFloat64, {}}}};
}

// ElementLoss(output, targets): attribute kind is squared, absolute or bce_with_logits.
const RegisterOp kElementLoss{{
    .name = "ElementLoss",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      same_types(op);
      return {{DType::kFloat64, {}}};
    },
    .cost = [](const OpContext& op) -> Cost {
      Cost cost = memory_bound_cost(op);
      cost.flops = 4.0 * static_cast<double>(op.num_elements(0));
      return cost;
    },
    .sharding = [](const OpContext& op) -> ShardingRule {
      Factors factors(op, dims(op) + "," + dims(op) + "->");
      for (size_t d = 0; d < op.input_shape(0).size(); ++d) {
        factors.reduction(concat("a", d));
      }
      return factors;
    },
    .reference_kernel = element_loss_kernel,
    .gradient =
        [](GradientBuilder& g) {
          if (g.needs_grad(0)) {
            g.set_input_grad(
                0,
                g.op(
                    "ElementLossGrad", {g.input(0), g.input(1), g.output_grad(0)}, g.attributes()));
          }
        },
    .workspace =
        [](const OpContext& op, const DeviceSpec&) {
          return std::max<int64_t>(
                     1, (op.num_elements(0) + kElementLossBlock - 1) / kElementLossBlock) *
                 static_cast<int64_t>(sizeof(double));
        },
    .cpu_kernel = element_loss_kernel,
    .examples = {example("squared"), example("absolute"), example("bce_with_logits")},
}};

const RegisterOp kElementLossGrad{{
    .name = "ElementLossGrad",
    .infer_types = [](const OpContext& op) -> TensorTypes {
      same_types(op);
      return {op.input_type(0)};
    },
    .cost = [](const OpContext& op) -> Cost { return memory_bound_cost(op, 4); },
    .sharding = [](const OpContext& op) -> ShardingRule {
      return Factors(op, dims(op) + "," + dims(op) + ",->" + dims(op));
    },
    .reference_kernel = element_loss_grad_kernel,
    .not_differentiable = true,
    .inplace = {{0, 0}},
    .examples = {grad_example("squared"),
                 grad_example("absolute"),
                 grad_example("bce_with_logits")},
}};

}  // namespace

}  // namespace trainrt
