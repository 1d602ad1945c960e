// Channels that lie side by side (nhwc), as many as sixteen bytes hold: one load, one store and one
// division serve them all.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "ops/launch.cuh"

namespace trainrt {

// kCount neighbouring elements, read and written in words of up to 16 bytes.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) ChannelPack {
  T values[kCount];
};

template <typename T>
constexpr int kChannelPack = static_cast<int>(16 / sizeof(T));

template <int kCount, typename T>
TRAINRT_HOST_DEVICE inline ChannelPack<T, kCount> load_pack(const T* from) {
  return *reinterpret_cast<const ChannelPack<T, kCount>*>(from);
}

template <int kCount, typename T>
TRAINRT_HOST_DEVICE inline void store_pack(T* to, const ChannelPack<T, kCount>& pack) {
  *reinterpret_cast<ChannelPack<T, kCount>*>(to) = pack;
}

// Whether rows of `c` channels are whole packs of `count`, and every one of `data` (null: absent)
// begins with a whole word.
inline bool takes_packs(int64_t c, int count, std::initializer_list<const void*> data) {
  bool aligned = c % count == 0;
  for (const void* at : data) {
    aligned = aligned && reinterpret_cast<uintptr_t>(at) % 16 == 0;
  }
  return aligned;
}

// Quotient and remainder; 32-bit divisions take a fraction of the time.
struct Quotient {
  int64_t quotient, remainder;
};
TRAINRT_HOST_DEVICE inline Quotient divide(int64_t i, int64_t by) {
  if ((i | by) <= 0xffffffff) {
    const uint32_t n = static_cast<uint32_t>(i), d = static_cast<uint32_t>(by);
    return {n / d, n % d};
  }
  return {i / by, i % by};
}

}  // namespace trainrt
