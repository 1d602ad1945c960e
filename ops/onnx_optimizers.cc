// The optimizers of ai.onnx.preview.training, exactly as ONNX's specification has them (they differ
// from PyTorch's in where epsilon, decay and the step counter enter). ONNX's operators are
// variadic; here each tensor has a node of its own. R is the learning rate, T the update count
// (int64), X the optimized tensor, G its gradient, V and H the moments.
//
//   OnnxAdagrad(X, G, H, R, T), OnnxAdam(X, G, V, H, R, T), OnnxMomentum(X, G, V, R, T)
#include <cmath>

#include "graph/op_def.h"
#include "graph/upgrade.h"

namespace trainrt {

namespace {

constexpr int64_t kGrain = 8192;

double scalar(const KernelContext& k, int i) {
  switch (k.input_dtype(i)) {
    case DType::kFloat32:
      return static_cast<double>(*k.input<float>(i));
    case DType::kFloat64:
      return *k.input<double>(i);
    case DType::kInt64:
      return static_cast<double>(*k.input<int64_t>(i));
    default:
      TRAINRT_FAIL(kUnsupported,
                   k.node().name,
                   ": R or T is ",
                   dtype_name(k.input_dtype(i)),
                   ", wanted float32, float64 or int64");
  }
}

void adagrad_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const Attributes& a = k.attributes();
    const T r = static_cast<T>(scalar(k, 3) / (1 + scalar(k, 4) * a.get_float("decay_factor", 0)));
    const T decay = static_cast<T>(a.get_float("norm_coefficient", 0));
    const T epsilon = static_cast<T>(a.get_float("epsilon", 0));
    const T *x = k.input<T>(0), *g = k.input<T>(1), *h = k.input<T>(2);
    T *x_new = k.output<T>(0), *h_new = k.output<T>(1);
    k.parallel_for(num_elements(k.input_shape(0)), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T grad = decay * x[i] + g[i];
        const T sum = h[i] + grad * grad;
        x_new[i] = x[i] - r * grad / (std::sqrt(sum) + epsilon);
        h_new[i] = sum;
      }
    });
  });
}

void adam_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const Attributes& a = k.attributes();
    const double alpha = a.get_float("alpha", 0.9);
    const double beta = a.get_float("beta", 0.999);
    const double t = scalar(k, 5);
    double rate = scalar(k, 4);
    if (t > 0) {
      rate *= std::sqrt(1 - std::pow(beta, t)) / (1 - std::pow(alpha, t));
    }
    const T r = static_cast<T>(rate);
    const T alpha1 = static_cast<T>(alpha), alpha2 = static_cast<T>(1 - alpha);
    const T beta1 = static_cast<T>(beta), beta2 = static_cast<T>(1 - beta);
    const T decay = static_cast<T>(a.get_float("norm_coefficient", 0));
    const T keep = static_cast<T>(1 - a.get_float("norm_coefficient_post", 0));
    const T epsilon = static_cast<T>(a.get_float("epsilon", 0));
    const T *x = k.input<T>(0), *g = k.input<T>(1), *v = k.input<T>(2), *h = k.input<T>(3);
    T *x_new = k.output<T>(0), *v_new = k.output<T>(1), *h_new = k.output<T>(2);
    k.parallel_for(num_elements(k.input_shape(0)), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T grad = decay * x[i] + g[i];
        const T first = alpha1 * v[i] + alpha2 * grad;
        const T second = beta1 * h[i] + beta2 * grad * grad;
        x_new[i] = keep * (x[i] - r * first / (std::sqrt(second) + epsilon));
        v_new[i] = first;
        h_new[i] = second;
      }
    });
  });
}

void momentum_kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const Attributes& a = k.attributes();
    const bool nesterov = a.get_string("mode") == "nesterov";
    const T r = static_cast<T>(scalar(k, 3));
    const T alpha = static_cast<T>(a.get_float("alpha"));
    const T beta = static_cast<T>(scalar(k, 4) > 0 ? a.get_float("beta") : 1);
    const T decay = static_cast<T>(a.get_float("norm_coefficient"));
    const T *x = k.input<T>(0), *g = k.input<T>(1), *v = k.input<T>(2);
    T *x_new = k.output<T>(0), *v_new = k.output<T>(1);
    k.parallel_for(num_elements(k.input_shape(0)), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T grad = decay * x[i] + g[i];
        const T velocity = alpha * v[i] + beta * grad;
        x_new[i] = x[i] - r * (nesterov ? grad + alpha * velocity : velocity);
        v_new[i] = velocity;
      }
    });
  });
}

// num_states moments: 1 or 2.
OpDef make_op(const char* name, int num_states, Kernel kernel, Attributes example) {
  OpDef op;
  op.name = name;
  op.infer_types = [=](const OpContext& c) -> TensorTypes {
    for (int i = 1; i < num_states + 2; ++i) {
      TRAINRT_REQUIRE(c.input_type(i) == c.input_type(0),
                      kInvalidModel,
                      name,
                      ": the optimized tensor is ",
                      dtype_name(c.input_dtype(0)),
                      shape_string(c.input_shape(0)),
                      ", its gradient or moment ",
                      dtype_name(c.input_dtype(i)),
                      shape_string(c.input_shape(i)));
    }
    for (int i = num_states + 2; i < num_states + 4; ++i) {
      TRAINRT_REQUIRE(c.num_elements(i) == 1, kInvalidModel, name, ": R and T must be scalars");
    }
    return TensorTypes(static_cast<size_t>(num_states) + 1, c.input_type(0));
  };
  op.cost = [=](const OpContext& c) -> Cost {
    Cost cost = memory_bound_cost(c);
    cost.flops = 10.0 * static_cast<double>(c.num_elements(0));
    return cost;
  };
  op.sharding = [=](const OpContext& c) -> ShardingRule {
    std::string dims;
    for (size_t d = 0; d < c.input_shape(0).size(); ++d) {
      dims += concat("a", d, " ");
    }
    std::string inputs = dims;
    std::string outputs = dims;
    for (int i = 1; i < num_states + 2; ++i) {
      inputs += "," + dims;
    }
    for (int i = 0; i < num_states; ++i) {
      outputs += "," + dims;
    }
    for (int i = num_states + 2; i < num_states + 4; ++i) {
      inputs += c.input_shape(i).empty() ? "," : ",1";
    }
    return Factors(c, inputs + "->" + outputs);
  };
  op.reference_kernel = std::move(kernel);
  op.not_differentiable = true;
  op.inplace = {{0, 0}, {1, 2}};
  if (num_states == 2) {
    op.inplace.push_back({2, 3});
  }
  OpExample use;
  use.name = "step";
  use.attributes = std::move(example);
  use.inputs = TensorTypes(static_cast<size_t>(num_states) + 2, {DType::kFloat32, {4, 6}});
  use.inputs.push_back({DType::kFloat32, {}});
  use.inputs.push_back({DType::kInt64, {}});
  use.low = 0.1;
  use.high = 1;
  op.examples = {use};
  return op;
}

const RegisterOp kAdagrad{
    make_op("OnnxAdagrad", 1, adagrad_kernel, {{"decay_factor", 0.1}, {"epsilon", 1e-5}})};
const RegisterOp kAdam{make_op(
    "OnnxAdam", 2, adam_kernel, {{"norm_coefficient", 0.01}, {"norm_coefficient_post", 0.02}})};
const RegisterOp kMomentum{make_op("OnnxMomentum",
                                   1,
                                   momentum_kernel,
                                   {{"alpha", 0.9},
                                    {"beta", 0.8},
                                    {"mode", std::string("nesterov")},
                                    {"norm_coefficient", 0.01}})};

// R, T, X1 ... Xn, G1 ... Gn, then the moments in the same way; outputs X1 ... Xn, moments ...
void upgrade_variadic(UpgradeContext& u, const std::string& op_type, int num_states) {
  const int groups = num_states + 2;
  if (u.num_inputs() < 2 + groups || (u.num_inputs() - 2) % groups != 0) {
    u.fail(concat("has ", u.num_inputs(), " inputs, wanted 2 + ", groups, " n"));
  }
  const int n = (u.num_inputs() - 2) / groups;
  for (int i = 0; i < n; ++i) {
    std::vector<ValueId> inputs;
    for (int group = 0; group < groups; ++group) {
      inputs.push_back(u.input(2 + group * n + i));
    }
    inputs.push_back(u.input(0));
    inputs.push_back(u.input(1));
    const std::vector<ValueId> outputs =
        n == 1 ? u.emit(op_type, inputs, u.attributes())
               : u.node(op_type, inputs, u.attributes(), concat(u.node_name(), "/", i));
    for (int group = 0; group <= num_states; ++group) {
      if (u.wants_output(group * n + i)) {
        u.set_output(group * n + i, outputs[static_cast<size_t>(group)]);
      }
    }
  }
}

const RegisterUpgrade kUpgradeAdagrad{"ai.onnx.preview.training", "Adagrad", [](UpgradeContext& u) {
                                        upgrade_variadic(u, "OnnxAdagrad", 1);
                                      }};
const RegisterUpgrade kUpgradeAdam{"ai.onnx.preview.training", "Adam", [](UpgradeContext& u) {
                                     upgrade_variadic(u, "OnnxAdam", 2);
                                   }};
const RegisterUpgrade kUpgradeMomentum{
    "ai.onnx.preview.training", "Momentum", [](UpgradeContext& u) {
      upgrade_variadic(u, "OnnxMomentum", 1);
    }};

}  // namespace

}  // namespace trainrt
