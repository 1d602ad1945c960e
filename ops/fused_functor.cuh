// What a fused kernel has to know of the functor of a step: its name and bytes, for the text that
// NVRTC compiles; and how the host calls it, for the test double.
#pragma once

#include <cxxabi.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "graph/attribute.h"

namespace trainrt {

struct FusedFunctor {
  std::string type;             // "trainrt::Swish"; in a header that ops/functors.h includes
  std::vector<uint64_t> bytes;  // as words; none: without members
#ifndef __CUDACC__
  float (*run_float)(const void* functor, const float* operands) = nullptr;
  double (*run_double)(const void* functor, const double* operands) = nullptr;
#endif
};

using FusedFunctorOf = FusedFunctor (*)(const Attributes&);

// For the steps of this operator.
void register_fused_functor(const std::string& op_type, FusedFunctorOf functor);

struct RegisterFusedFunctor {
  RegisterFusedFunctor(const char* op_type, FusedFunctorOf functor) {
    register_fused_functor(op_type, functor);
  }
};

namespace internal {

template <typename F, typename C, size_t... kIndex>
C run_functor(const void* functor, const C* operands, std::index_sequence<kIndex...>) {
  return (*static_cast<const F*>(functor))(operands[kIndex]...);
}

}  // namespace internal

template <typename F, size_t kNumInputs>
FusedFunctor fused_functor(const Attributes& attributes) {
  static_assert(std::is_trivially_copyable_v<F> && std::is_trivially_destructible_v<F> &&
                alignof(F) <= alignof(uint64_t));
  FusedFunctor result;
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(typeid(F).name(), nullptr, nullptr, &status), &std::free);
  result.type = name.get();
  if constexpr (!std::is_empty_v<F>) {
    // Made where there are zeros, so that bytes between members are the same in every run.
    result.bytes.assign((sizeof(F) + sizeof(uint64_t) - 1) / sizeof(uint64_t), 0);
    if constexpr (std::is_constructible_v<F, const Attributes&>) {
      new (result.bytes.data()) F(attributes);
    }
  }
#ifndef __CUDACC__
  using Indices = std::make_index_sequence<kNumInputs>;
  result.run_float = [](const void* functor, const float* operands) {
    return internal::run_functor<F>(functor, operands, Indices{});
  };
  result.run_double = [](const void* functor, const double* operands) {
    return internal::run_functor<F>(functor, operands, Indices{});
  };
#endif
  return result;
}

}  // namespace trainrt
