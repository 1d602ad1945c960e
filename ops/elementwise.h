// Element-wise operators from functors. A functor says what happens to one element:
//
//   struct Exp {
//     template <typename T> T operator()(T x) const { return vmath::exp(x); }
//   };
//
// and, if it has attributes, is constructed from `const Attributes&`. It is compiled for at most
// four types: double (every reference kernel on floats), float (fast kernels on float32, float16
// and bfloat16), int64 and uint64 (integers of all widths, as wrapping arithmetic allows).
// Everything else (broadcasting, conversion, cutting into blocks) is ordinary code in
// elementwise.cc, so that an operator costs little to compile.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "graph/graph_builder.h"
#include "graph/kernel.h"
#include "graph/op_def.h"
#include "graph/upgrade.h"
#include "ops/broadcast.h"

namespace trainrt {

enum class Numbers : uint8_t { kFloating, kNumeric };  // kNumeric: integers too

namespace elementwise {

// out[i] = functor(in[0][i], in[1][i], ...); an input whose bit in `repeated` is set has one
// element.
using InnerLoop =
    void (*)(const void* functor, const void* const* in, unsigned repeated, void* out, int64_t n);

struct Loop {
  DType compute;  // inputs are converted to this
  DType result;   // what the loop writes: `compute`, or bool
  InnerLoop run;
};

// Runs `loop` over all inputs of the node, broadcast to output 0. Inputs must have one dtype.
void run(KernelContext& context, const Loop& loop, const void* functor);

// The same with input dtypes that the loop reads as they are (Where: bool, T, T).
void run_unconverted(KernelContext& context, InnerLoop loop, const void* functor);

template <typename T, unsigned kRepeated, typename F, size_t... kIndex>
void vector_loop(
    const F& functor, const void* const* in, void* out, int64_t n, std::index_sequence<kIndex...>) {
  using Result = decltype(functor((static_cast<void>(kIndex), T{})...));
  Result* result = static_cast<Result*>(out);
  constexpr bool once[] = {((kRepeated >> kIndex) & 1) != 0 ...};
  // A copy: the compiler then knows that writing the output does not change it.
  const F f = functor;
  // An in-place output is exactly one of the inputs, which carries no dependence between elements.
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    result[i] = f(static_cast<const T*>(in[kIndex])[once[kIndex] ? 0 : i]...);
  }
}

// Finds the vector loop compiled for this pattern of repeated inputs.
template <typename T, typename F, size_t kNumInputs, unsigned kRepeated = 0>
void inner_loop(
    const void* functor, const void* const* in, unsigned repeated, void* out, int64_t n) {
  if constexpr (kRepeated < (1u << kNumInputs)) {
    if (repeated == kRepeated) {
      vector_loop<T, kRepeated>(
          *static_cast<const F*>(functor), in, out, n, std::make_index_sequence<kNumInputs>{});
    } else {
      inner_loop<T, F, kNumInputs, kRepeated + 1>(functor, in, repeated, out, n);
    }
  }
}

template <typename F, typename... T>
Loop loop_of_types() {
  using Compute = std::tuple_element_t<0, std::tuple<T...>>;
  return {dtype_of<Compute>,
          dtype_of<std::invoke_result_t<F, T...>>,
          inner_loop<Compute, F, sizeof...(T)>};
}

template <typename T, typename F, size_t kNumInputs>
Loop loop_of() {
  if constexpr (kNumInputs == 1) {
    return loop_of_types<F, T>();
  } else if constexpr (kNumInputs == 2) {
    return loop_of_types<F, T, T>();
  } else {
    return loop_of_types<F, T, T, T>();
  }
}

[[noreturn]] void fail_dtype(const Node& node, DType dtype);

template <typename F, size_t kNumInputs, Numbers kNumbers>
Loop select_loop(const Node& node, DType dtype, bool fast) {
  if (is_floating(dtype)) {
    return fast && dtype != DType::kFloat64 ? loop_of<float, F, kNumInputs>()
                                            : loop_of<double, F, kNumInputs>();
  }
  if constexpr (kNumbers == Numbers::kNumeric) {
    switch (dtype) {
      case DType::kUInt8:
      case DType::kUInt16:
      case DType::kUInt32:
      case DType::kUInt64:
        return loop_of<uint64_t, F, kNumInputs>();
      default:
        return loop_of<int64_t, F, kNumInputs>();  // bool counts as 0 and 1
    }
  }
  fail_dtype(node, dtype);
}

template <typename F>
F make_functor(const Attributes& attributes) {
  if constexpr (std::is_constructible_v<F, const Attributes&>) {
    return F(attributes);
  } else {
    return F{};
  }
}

template <typename F, size_t kNumInputs, Numbers kNumbers>
Kernel kernel(bool fast) {
  return [fast](KernelContext& context) {
    const F functor = make_functor<F>(context.attributes());
    run(context,
        select_loop<F, kNumInputs, kNumbers>(context.node(), context.input_dtype(0), fast),
        &functor);
  };
}

// Types, cost and sharding without kernels.
OpDef unary_form(std::string name, Numbers numbers, bool predicate);
OpDef broadcasting_form(std::string name, int num_inputs, Numbers numbers, bool predicate);

}  // namespace elementwise

// An operator of one input. Its ONNX form is the same; set `upgrade` to nullptr or to a rule of its
// own where it is not. The caller adds gradient and examples.
template <typename F, Numbers kNumbers = Numbers::kFloating>
OpDef unary_op(std::string name) {
  constexpr bool predicate = std::is_same_v<std::invoke_result_t<F, double>, bool>;
  OpDef op = elementwise::unary_form(std::move(name), kNumbers, predicate);
  op.reference_kernel = elementwise::kernel<F, 1, kNumbers>(false);
  op.cpu_kernel = elementwise::kernel<F, 1, kNumbers>(true);
  return op;
}

// An operator of two inputs that broadcast against each other.
template <typename F, Numbers kNumbers = Numbers::kFloating>
OpDef binary_op(std::string name) {
  constexpr bool predicate = std::is_same_v<std::invoke_result_t<F, double, double>, bool>;
  OpDef op = elementwise::broadcasting_form(std::move(name), 2, kNumbers, predicate);
  op.reference_kernel = elementwise::kernel<F, 2, kNumbers>(false);
  op.cpu_kernel = elementwise::kernel<F, 2, kNumbers>(true);
  return op;
}

// An operator of three floating-point inputs that broadcast; in no ONNX model.
template <typename F>
OpDef ternary_op(std::string name) {
  OpDef op = elementwise::broadcasting_form(std::move(name), 3, Numbers::kFloating, false);
  op.reference_kernel = elementwise::kernel<F, 3, Numbers::kFloating>(false);
  op.cpu_kernel = elementwise::kernel<F, 3, Numbers::kFloating>(true);
  op.upgrade = nullptr;
  return op;
}

// "<name>": (x or y of the forward operator, dy) -> dx, which exists in no ONNX model. Linear in
// dy; may overwrite dy.
template <typename F>
OpDef unary_grad_op(std::string name) {
  OpDef op = binary_op<F>(std::move(name));
  op.upgrade = nullptr;
  op.inplace = {{0, 1}};
  op.sharding = [](const OpContext& context) -> ShardingRule {
    return Factors::elementwise(context).linear({{1}});
  };
  return op;
}

// A gradient rule that is one node: dx = grad_op(x or y, dy), with the forward node's attributes.
std::function<void(GradientBuilder&)> gradient_from_input(std::string grad_op);
std::function<void(GradientBuilder&)> gradient_from_output(std::string grad_op);

// An example of one float32 input with draws from [low, high).
OpExample unary_example(double low, double high, Attributes attributes = {});
// Examples of a binary operator: equal shapes, and every way of broadcasting.
std::vector<OpExample> binary_examples(double low, double high, Attributes attributes = {});
OpExample grad_example(double low, double high, Attributes attributes = {});

}  // namespace trainrt
