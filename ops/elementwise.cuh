// The functors of element-wise operators on a CUDA device. One kernel serves equal shapes, scalars
// and every other way of broadcasting; where each operand either walks like the output or has one
// element, a thread takes kPack elements in one load.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "ops/broadcast.h"
#include "ops/elementwise.h"
#include "ops/fused_functor.cuh"
#include "ops/launch.cuh"

namespace trainrt::elementwise {

constexpr int kPack = 4;

// How tensors hold numbers that are computed in C: floats of any width, or integers of any width as
// 64 bits. The dtype is looked up at run time, so that a functor has two such kernels, not twelve.
template <typename Wide>
struct StoredFloat {
  using C = Wide;
  TRAINRT_HOST_DEVICE static Wide load(const void* data, DType dtype, int64_t i) {
    if constexpr (std::is_same_v<Wide, double>) {
      return static_cast<const double*>(data)[i];
    } else {
      return dtype == DType::kFloat32   ? static_cast<const float*>(data)[i]
             : dtype == DType::kFloat16 ? to_compute<float>(static_cast<const Float16*>(data)[i])
                                        : to_compute<float>(static_cast<const BFloat16*>(data)[i]);
    }
  }
  TRAINRT_HOST_DEVICE static void store(void* data, DType dtype, int64_t i, Wide value) {
    if constexpr (std::is_same_v<Wide, double>) {
      static_cast<double*>(data)[i] = value;
    } else if (dtype == DType::kFloat32) {
      static_cast<float*>(data)[i] = value;
    } else if (dtype == DType::kFloat16) {
      static_cast<Float16*>(data)[i] = to_storage<Float16>(value);
    } else {
      static_cast<BFloat16*>(data)[i] = to_storage<BFloat16>(value);
    }
  }
};

template <typename Wide>
struct StoredInteger {
  using C = Wide;
  TRAINRT_HOST_DEVICE static Wide load(const void* data, DType dtype, int64_t i) {
    switch (dtype) {
      case DType::kInt8:
        return static_cast<Wide>(static_cast<const int8_t*>(data)[i]);
      case DType::kInt16:
        return static_cast<Wide>(static_cast<const int16_t*>(data)[i]);
      case DType::kInt32:
        return static_cast<Wide>(static_cast<const int32_t*>(data)[i]);
      case DType::kUInt8:
      case DType::kBool:
        return static_cast<Wide>(static_cast<const uint8_t*>(data)[i]);
      case DType::kUInt16:
        return static_cast<Wide>(static_cast<const uint16_t*>(data)[i]);
      case DType::kUInt32:
        return static_cast<Wide>(static_cast<const uint32_t*>(data)[i]);
      default:
        return static_cast<Wide>(static_cast<const uint64_t*>(data)[i]);
    }
  }
  TRAINRT_HOST_DEVICE static void store(void* data, DType dtype, int64_t i, Wide value) {
    switch (dtype) {
      case DType::kInt8:
      case DType::kUInt8:
        static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(value);
        return;
      case DType::kInt16:
      case DType::kUInt16:
        static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(value);
        return;
      case DType::kInt32:
      case DType::kUInt32:
        static_cast<uint32_t*>(data)[i] = static_cast<uint32_t>(value);
        return;
      default:
        static_cast<uint64_t*>(data)[i] = static_cast<uint64_t>(value);
    }
  }
};

template <typename T>
struct alignas(kPack * sizeof(T)) Pack {
  T values[kPack];
};

// One launch. S is StoredFloat or StoredInteger; its functor gets numbers of S::C.
template <typename F, typename S, size_t kNumInputs>
struct Map {
  using C = typename S::C;
  F functor;
  DType dtype;
  const void* in[kNumInputs];
  void* out;
  int64_t n;
  int ndim;
  int64_t dims[kMaxDims];
  int64_t strides[kNumInputs][kMaxDims];

  template <typename Offsets, size_t... kIndex>
  TRAINRT_HOST_DEVICE void element(int64_t i,
                                   const Offsets& offsets,
                                   std::index_sequence<kIndex...>) const {
    const auto result = functor(S::load(in[kIndex], dtype, offsets[kIndex])...);
    if constexpr (std::is_same_v<std::remove_cv_t<decltype(result)>, bool>) {
      static_cast<bool*>(out)[i] = result;
    } else {
      S::store(out, dtype, i, static_cast<C>(result));
    }
  }

  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    int64_t offsets[kNumInputs] = {};
    int64_t rest = i;
    for (int d = ndim - 1; d > 0; --d) {
      const int64_t index = rest % dims[d];
      rest /= dims[d];
      for (size_t operand = 0; operand < kNumInputs; ++operand) {
        offsets[operand] += index * strides[operand][d];
      }
    }
    for (size_t operand = 0; operand < kNumInputs; ++operand) {
      offsets[operand] += rest * strides[operand][0];
    }
    element(i, offsets, std::make_index_sequence<kNumInputs>{});
  }
};

// The same for floats in packs: every stride is 0 or 1 and there is one dim.
template <typename F, typename T, size_t kNumInputs>
struct PackedMap {
  using C = ComputeOf<T>;
  F functor;
  const T* in[kNumInputs];
  T* out;
  int64_t n;
  bool once[kNumInputs];  // the operand has one element

  template <size_t... kIndex>
  TRAINRT_HOST_DEVICE void run(int64_t first, int64_t count, std::index_sequence<kIndex...>) const {
    Pack<T> packs[kNumInputs];
    for (size_t operand = 0; operand < kNumInputs; ++operand) {
      if (once[operand]) {
        for (T& value : packs[operand].values) {
          value = in[operand][0];
        }
      } else if (count == kPack) {
        packs[operand] = *reinterpret_cast<const Pack<T>*>(in[operand] + first);
      } else {
        for (int64_t j = 0; j < count; ++j) {
          packs[operand].values[j] = in[operand][first + j];
        }
      }
    }
    Pack<T> result;
    for (int64_t j = 0; j < count; ++j) {
      result.values[j] = to_storage<T>(functor(to_compute<C>(packs[kIndex].values[j])...));
    }
    if (count == kPack) {
      *reinterpret_cast<Pack<T>*>(out + first) = result;
    } else {
      for (int64_t j = 0; j < count; ++j) {
        out[first + j] = result.values[j];
      }
    }
  }

  TRAINRT_HOST_DEVICE void operator()(int64_t pack) const {
    const int64_t first = pack * kPack;
    const int64_t rest = n - first;
    run(first, rest < kPack ? rest : kPack, std::make_index_sequence<kNumInputs>{});
  }
};

// Whether F answers with a bool whatever it is asked.
template <typename F, typename C, size_t... kIndex>
constexpr bool answers_bool(std::index_sequence<kIndex...>) {
  return std::is_same_v<std::invoke_result_t<F, decltype((void)kIndex, C{})...>, bool>;
}

inline BroadcastLoops loops_of(const KernelContext& context, size_t num_inputs) {
  std::array<const Shape*, kMaxOperands> shapes{};
  TRAINRT_CHECK(num_inputs <= kMaxOperands, context.node().name);
  for (size_t i = 0; i < num_inputs; ++i) {
    const int input = static_cast<int>(i);
    TRAINRT_CHECK(context.has_input(input), context.node().name, ": input ", i, " is absent");
    shapes[i] = &context.input_shape(input);
  }
  return broadcast_loops(context.output_shape(0), std::span(shapes).first(num_inputs));
}

template <typename F, typename T, size_t kNumInputs>
bool launch_packed(KernelContext& context, const F& functor, const BroadcastLoops& loops) {
  PackedMap<F, T, kNumInputs> map{functor, {}, static_cast<T*>(context.raw_output(0)), 0, {}};
  map.n = num_elements(context.output_shape(0));
  const auto aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % sizeof(Pack<T>) == 0;
  };
  bool fits = loops.ndim == 1 && aligned(map.out);
  for (size_t i = 0; i < kNumInputs && fits; ++i) {
    map.in[i] = static_cast<const T*>(context.raw_input(static_cast<int>(i)));
    map.once[i] = loops.strides[i][0] == 0;
    fits = (map.once[i] || loops.strides[i][0] == 1) && aligned(map.in[i]);
  }
  if (fits) {
    launch(context, (map.n + kPack - 1) / kPack, map);
  }
  return fits;
}

template <typename S, size_t kNumInputs, typename F>
void launch_map(KernelContext& context, const F& functor, const BroadcastLoops& loops) {
  Map<F, S, kNumInputs> map{functor, context.input_dtype(0), {}, nullptr, 0, 1, {}, {}};
  map.out = context.raw_output(0);
  map.n = num_elements(context.output_shape(0));
  map.ndim = loops.ndim;
  for (int d = 0; d < loops.ndim; ++d) {
    map.dims[d] = loops.dims[static_cast<size_t>(d)];
  }
  for (size_t i = 0; i < kNumInputs; ++i) {
    map.in[i] = context.raw_input(static_cast<int>(i));
    for (int d = 0; d < loops.ndim; ++d) {
      map.strides[i][d] = loops.strides[i][static_cast<size_t>(d)];
    }
  }
  launch(context, map.n, map);
}

// Applies `functor` to all elements of the node's inputs, broadcast to output 0.
template <size_t kNumInputs, Numbers kNumbers, typename F>
void run_cuda(KernelContext& context, const F& functor) {
  const BroadcastLoops loops = loops_of(context, kNumInputs);
  const DType dtype = context.input_dtype(0);
  if (is_floating(dtype)) {
    dispatch_stored(context.node(), dtype, [&](auto tag) {
      using T = decltype(tag);
      using C = ComputeOf<T>;
      if constexpr (!answers_bool<F, C>(std::make_index_sequence<kNumInputs>{})) {
        if (launch_packed<F, T, kNumInputs>(context, functor, loops)) {
          return;
        }
      }
      launch_map<StoredFloat<C>, kNumInputs>(context, functor, loops);
    });
    return;
  }
  if constexpr (kNumbers == Numbers::kNumeric) {
    switch (dtype) {
      case DType::kUInt8:
      case DType::kUInt16:
      case DType::kUInt32:
      case DType::kUInt64:
        return launch_map<StoredInteger<uint64_t>, kNumInputs>(context, functor, loops);
      default:
        return launch_map<StoredInteger<int64_t>, kNumInputs>(context, functor, loops);
    }
  }
  fail_dtype(context.node(), dtype);
}

// Registers an element-wise operator's CUDA kernel.
template <typename F, size_t kNumInputs, Numbers kNumbers = Numbers::kFloating>
struct RegisterCuda : RegisterKernel {
  explicit RegisterCuda(const char* op_type)
      : RegisterKernel(op_type, Backend::kCuda, [](const OpContext&, const DeviceSpec&) -> Kernel {
          return [](KernelContext& context) {
            run_cuda<kNumInputs, kNumbers>(context, make_functor<F>(context.attributes()));
          };
        }) {
    if constexpr (!answers_bool<F, float>(std::make_index_sequence<kNumInputs>{})) {
      register_fused_functor(op_type, fused_functor<F, kNumInputs>);
    }
  }
};

}  // namespace trainrt::elementwise

namespace trainrt {

template <typename F, Numbers kNumbers = Numbers::kFloating>
using RegisterUnary = elementwise::RegisterCuda<F, 1, kNumbers>;
template <typename F, Numbers kNumbers = Numbers::kFloating>
using RegisterBinary = elementwise::RegisterCuda<F, 2, kNumbers>;
template <typename F>
using RegisterTernary = elementwise::RegisterCuda<F, 3>;

// A kernel that needs no preparation.
struct RegisterCudaKernel : RegisterKernel {
  RegisterCudaKernel(const char* op_type, void (*kernel)(KernelContext&))
      : RegisterKernel(op_type, Backend::kCuda, [kernel](const OpContext&, const DeviceSpec&) {
          return Kernel(kernel);
        }) {}
};

}  // namespace trainrt
