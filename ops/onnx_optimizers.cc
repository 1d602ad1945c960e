// The optimizers of ai.onnx.preview.training, exactly as ONNX's specification has them (they differ
// from PyTorch's in where epsilon, decay and the step counter enter). ONNX's operators are
// variadic; here each tensor has a node of its own. R is the learning rate, T the update count
// (int64), X the optimized tensor, G its gradient, V and H the moments.
//
//   OnnxAdagrad(X, G, H, R, T), OnnxAdam(X, G, V, H, R, T), OnnxMomentum(X, G, V, R, T)
#include <cmath>

#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/optimizer_kernel.h"

namespace trainrt {

namespace {

constexpr int64_t kGrain = 8192;

template <template <typename> typename Rule>
void kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    constexpr int kStates = Rule<T>::kStates;
    const Rule<T> rule(optimizer::OnnxConstants(k.attributes()),
                       optimizer::scalar_input(k, kStates + 2),
                       optimizer::scalar_input(k, kStates + 3));
    const T *x = k.input<T>(0), *g = k.input<T>(1);
    const T* states[] = {k.input<T>(2), kStates > 1 ? k.input<T>(3) : nullptr};
    T* x_new = k.output<T>(0);
    T* new_states[] = {k.output<T>(1), kStates > 1 ? k.output<T>(2) : nullptr};
    k.parallel_for(num_elements(k.input_shape(0)), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        T first = states[0][i];
        if constexpr (kStates == 1) {
          x_new[i] = rule(x[i], g[i], first);
        } else {
          T second = states[1][i];
          x_new[i] = rule(x[i], g[i], first, second);
          if (new_states[1] != nullptr) {
            new_states[1][i] = second;
          }
        }
        if (new_states[0] != nullptr) {  // absent in a model that keeps no moment
          new_states[0][i] = first;
        }
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

const RegisterOp kAdagrad{make_op(
    "OnnxAdagrad", 1, kernel<optimizer::OnnxAdagrad>, {{"decay_factor", 0.1}, {"epsilon", 1e-5}})};
const RegisterOp kAdam{make_op("OnnxAdam",
                               2,
                               kernel<optimizer::OnnxAdam>,
                               {{"norm_coefficient", 0.01}, {"norm_coefficient_post", 0.02}})};
const RegisterOp kMomentum{make_op("OnnxMomentum",
                                   1,
                                   kernel<optimizer::OnnxMomentum>,
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
