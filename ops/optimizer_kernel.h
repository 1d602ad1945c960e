// What the optimizers share. Each is one fused operator per parameter that works in place:
//   inputs  param, grad, state..., learning_rate, grad_scale, step    (the last three scalars)
//   outputs param, state...
// The gradient is multiplied by grad_scale (clipping, loss scale) as it is read, so no scaled copy
// exists. A grad_scale that is not finite skips the update. The arithmetic is that of PyTorch's
// single-tensor implementations; constants are computed in double.
#pragma once

#include <cmath>
#include <string>

#include "graph/op_def.h"
#include "ops/optimizer_rules.h"

namespace trainrt::optimizer {

inline constexpr int64_t kGrain = 8192;

inline double scalar_input(const KernelContext& k, int i) {
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
                   ": scalar input ",
                   i,
                   " is ",
                   dtype_name(k.input_dtype(i)),
                   ", wanted float32, float64 or int64");
  }
}

// The types: all tensors like the parameter, three scalars; outputs param and states.
inline TensorTypes infer(const OpContext& op, int num_states) {
  TRAINRT_REQUIRE(op.num_inputs() == num_states + 5,
                  kInvalidModel,
                  op.node().op_type,
                  " wants ",
                  num_states + 5,
                  " inputs, got ",
                  op.num_inputs());
  for (int i = 1; i < num_states + 2; ++i) {
    TRAINRT_REQUIRE(op.input_type(i) == op.input_type(0),
                    kInvalidModel,
                    op.node().op_type,
                    ": the parameter is ",
                    dtype_name(op.input_dtype(0)),
                    shape_string(op.input_shape(0)),
                    ", input ",
                    i,
                    " is ",
                    dtype_name(op.input_dtype(i)),
                    shape_string(op.input_shape(i)));
  }
  for (int i = num_states + 2; i < num_states + 5; ++i) {
    TRAINRT_REQUIRE(op.input_shape(i).empty(),
                    kInvalidModel,
                    op.node().op_type,
                    ": input ",
                    i,
                    " must be a scalar");
  }
  return TensorTypes(static_cast<size_t>(num_states) + 1, op.input_type(0));
}

// Element-wise over the parameter's dims, not linear in anything: gradients must be whole sums.
inline ShardingRule sharding(const OpContext& op, int num_states) {
  std::string dims;
  for (size_t d = 0; d < op.input_shape(0).size(); ++d) {
    dims += concat("a", d) + " ";
  }
  std::string equation = dims;
  for (int i = 1; i < num_states + 2; ++i) {
    equation += "," + dims;
  }
  equation += ",,,->" + dims;
  for (int i = 0; i < num_states; ++i) {
    equation += "," + dims;
  }
  return Factors(op, equation);
}

inline std::vector<Inplace> inplace(int num_states) {
  std::vector<Inplace> pairs = {{0, 0, true}};
  for (int i = 0; i < num_states; ++i) {
    pairs.push_back({i + 1, i + 2, true});
  }
  return pairs;
}

inline Cost cost(const OpContext& op, double flops_per_element) {
  Cost cost;
  cost.flops = flops_per_element * static_cast<double>(op.num_elements(0));
  cost.bytes = static_cast<double>(op.input_bytes() + op.output_bytes());
  return cost;
}

inline OpExample example(std::string name, Attributes attributes, int num_states) {
  OpExample e;
  e.name = std::move(name);
  e.attributes = std::move(attributes);
  e.inputs = TensorTypes(static_cast<size_t>(num_states) + 2, {DType::kFloat32, {4, 6}});
  e.values = std::vector<Tensor>(e.inputs.size());
  for (const DType dtype : {DType::kFloat32, DType::kFloat32, DType::kInt64}) {
    e.inputs.push_back({dtype, {}});
  }
  e.values.push_back(Tensor::scalar<float>(0.125f));
  e.values.push_back(Tensor::scalar<float>(0.5f));
  e.values.push_back(Tensor::scalar<int64_t>(3));
  e.low = 0.1;  // second moments are not negative
  e.high = 1;
  return e;
}

// Learning rate, grad_scale and step, from input `first` on.
inline Scalars scalars_of(const KernelContext& k, int first) {
  return {scalar_input(k, first), scalar_input(k, first + 1), scalar_input(k, first + 2)};
}

// Calls body(begin, end) over the parameter's elements in parallel, unless the update is skipped.
template <typename Body>
void update(KernelContext& k, double grad_scale, Body&& body) {
  if (std::isfinite(grad_scale)) {
    k.parallel_for(num_elements(k.input_shape(0)), kGrain, body);
  }
}

// The whole kernel of an optimizer: rule(param, grad, state...) for every element.
template <template <typename> typename Rule>
void kernel(KernelContext& k) {
  dispatch_floating(k.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    constexpr int kStates = Rule<T>::kStates;
    const Scalars scalars = scalars_of(k, kStates + 2);
    const Rule<T> rule(Constants(k.attributes()), scalars);
    T* __restrict__ param = k.output<T>(0);
    const T* __restrict__ grad = k.input<T>(1);
    T* __restrict__ first = kStates > 0 ? k.output<T>(1) : nullptr;
    T* __restrict__ second = kStates > 1 ? k.output<T>(2) : nullptr;
    update(k, scalars.grad_scale, [=](int64_t begin, int64_t end) {
      const Rule<T> r = rule;  // a copy: it does not change as param is written
      for (int64_t i = begin; i < end; ++i) {
        if constexpr (kStates == 0) {
          r(param[i], grad[i]);
        } else if constexpr (kStates == 1) {
          r(param[i], grad[i], first[i]);
        } else {
          r(param[i], grad[i], first[i], second[i]);
        }
      }
    });
  });
}

}  // namespace trainrt::optimizer
