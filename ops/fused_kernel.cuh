// What the text of a fused kernel is made of: how a thread reads, rounds and writes its elements.
// Compiled by NVRTC alone, behind ops/device_std.cuh (ops/fused_elementwise.cu).
#pragma once

#include "ops/fused_params.h"

namespace trainrt {

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// ---- elements: stored in T, computed in float or double ----------------------------------------

inline float widen(float x) {
  return x;
}
inline double widen(double x) {
  return x;
}
inline float widen(Float16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}
inline float widen(BFloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}

template <typename T>
struct Narrow {
  template <typename C>
  static T of(C x) {
    return static_cast<T>(x);
  }
};
template <>
struct Narrow<Float16> {
  template <typename C>
  static Float16 of(C x) {
    Float16 result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(static_cast<float>(x)));
    return result;
  }
};
template <>
struct Narrow<BFloat16> {
  template <typename C>
  static BFloat16 of(C x) {
    BFloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(static_cast<float>(x)));
    return result;
  }
};

// The compiler must not see through a result: it would contract a product and the next step's sum,
// whose bits are not those of two kernels.
inline float opaque(float x) {
  asm("" : "+f"(x));
  return x;
}
inline double opaque(double x) {
  asm("" : "+d"(x));
  return x;
}

// A step's result as the next one would read it from memory.
template <typename T, typename C>
auto rounded(C x) {
  return opaque(widen(Narrow<T>::of(x)));
}

// A functor from its bytes.
template <typename F, typename... Words>
F functor(Words... words) {
  alignas(8) const uint64_t bytes[] = {words...};
  static_assert(sizeof(F) <= sizeof(bytes) && alignof(F) <= 8);
  return *reinterpret_cast<const F*>(bytes);
}

// ---- tensors -----------------------------------------------------------------------------------

template <typename T, int kPack>
struct alignas(kPack * sizeof(T)) Pack {
  T values[kPack];
};

// As many bytes in one load or store.
template <int kBytes>
struct Word;
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

template <typename T, int kPack>
void copy_pack(const void* from, void* to) {
  using W = typename Word<kPack * sizeof(T)>::type;
  *static_cast<W*>(to) = *static_cast<const W*>(from);
}

// The elements of this thread: [first, first + count).
template <int kPack>
struct Place {
  explicit Place(int64_t n)
      : first((static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kPack),
        count(n - first < kPack ? static_cast<int>(n - first) : kPack) {}
  int64_t first;
  int count;
};

// Loops over a pack are unrolled, here too: an element that is named by a number known at run time
// alone would put the pack into local memory.
template <typename T, int kPack>
void load(const void* from, const Place<kPack>& place, Pack<T, kPack>& to) {
  const T* data = static_cast<const T*>(from) + place.first;
  if (place.count == kPack) {
    copy_pack<T, kPack>(data, &to);
    return;
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    if (j < place.count) {
      to.values[j] = data[j];
    }
  }
}

template <typename T, int kPack>
void load_once(const void* from, Pack<T, kPack>& to) {
  const T value = *static_cast<const T*>(from);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    to.values[j] = value;
  }
}

// Input number `which` of those that are broadcast. The innermost dim is a multiple of kPack, and a
// pack lies in one piece (kRun) or is one element. Index holds any number below p.n: dividing takes
// long in 64 bits.
template <int kDims, typename Index, bool kRun, typename T, int kPack>
void load_broadcast(const FusedParams& p,
                    int which,
                    const void* from,
                    const Place<kPack>& place,
                    Pack<T, kPack>& to) {
  Index rest = static_cast<Index>(place.first);
  int64_t offset = 0;
#pragma unroll
  for (int d = kDims - 1; d > 0; --d) {
    const Index dim = static_cast<Index>(p.dims[d]);
    offset += rest % dim * p.strides[which][d];
    rest /= dim;
  }
  offset += rest * p.strides[which][0];
  const T* data = static_cast<const T*>(from) + offset;
  if constexpr (kRun) {
    copy_pack<T, kPack>(data, &to);
  } else {
    load_once(data, to);
  }
}

template <typename T, int kPack>
void store(const Pack<T, kPack>& from, const Place<kPack>& place, void* to) {
  if (to == nullptr) {
    return;
  }
  T* data = static_cast<T*>(to) + place.first;
  if (place.count == kPack) {
    copy_pack<T, kPack>(&from, data);
    return;
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    if (j < place.count) {
      data[j] = from.values[j];
    }
  }
}

}  // namespace trainrt
