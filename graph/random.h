// Stateless random numbers: Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as
// 1, 2, 3", SC'11). A draw is a pure function of a key and a counter, so any element of any tensor
// can be drawn alone, in any order, on any rank.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace trainrt {

using RandomBlock = std::array<uint32_t, 4>;

constexpr RandomBlock philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  RandomBlock c = {static_cast<uint32_t>(counter_low),
                   static_cast<uint32_t>(counter_low >> 32),
                   static_cast<uint32_t>(counter_high),
                   static_cast<uint32_t>(counter_high >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0,
         static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1,
         static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Of `kLanes` consecutive values of counter_high: words[w][lane]. Many times as fast as one by one,
// as compilers make vectors of the lanes.
template <int kLanes>
void philox_lanes(uint64_t key,
                  uint64_t counter_low,
                  uint64_t counter_high,
                  uint32_t (&words)[4][kLanes]) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int lane = 0; lane < kLanes; ++lane) {
    const uint64_t high = counter_high + static_cast<uint64_t>(lane);
    words[0][lane] = static_cast<uint32_t>(counter_low);
    words[1][lane] = static_cast<uint32_t>(counter_low >> 32);
    words[2][lane] = static_cast<uint32_t>(high);
    words[3][lane] = static_cast<uint32_t>(high >> 32);
  }
  for (int round = 0; round < 10; ++round) {
#pragma omp simd
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t p0 = uint64_t{0xD2511F53u} * words[0][lane];
      const uint64_t p1 = uint64_t{0xCD9E8D57u} * words[2][lane];
      words[0][lane] = static_cast<uint32_t>(p1 >> 32) ^ words[1][lane] ^ k0;
      words[1][lane] = static_cast<uint32_t>(p1);
      words[2][lane] = static_cast<uint32_t>(p0 >> 32) ^ words[3][lane] ^ k1;
      words[3][lane] = static_cast<uint32_t>(p0);
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// 64-bit FNV-1a: the stable name of a node or tensor as part of a key.
inline uint64_t hash_name(std::string_view name, uint64_t hash = 0xcbf29ce484222325u) {
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  }
  return hash;
}

// SplitMix64's finaliser: mixes several key parts into one.
constexpr uint64_t mix_keys(uint64_t a, uint64_t b) {
  uint64_t z = a + 0x9E3779B97F4A7C15u * (b + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Uniform in [0, 1): 24 bits, exact in float.
constexpr float uniform_float(uint32_t word) {
  return static_cast<float>(word >> 8) * 0x1p-24f;
}

// Uniform in [0, 1): 53 bits.
constexpr double uniform_double(uint32_t high, uint32_t low) {
  return static_cast<double>(((uint64_t{high} << 32) | low) >> 11) * 0x1p-53;
}

// Standard normal by Box-Muller from two words; (0, 1] keeps the logarithm finite.
inline double normal_double(uint32_t a, uint32_t b) {
  const double u = (static_cast<double>(a) + 1.0) * 0x1p-32;
  const double v = static_cast<double>(b) * 0x1p-32;
  return std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586477 * v);
}

}  // namespace trainrt
