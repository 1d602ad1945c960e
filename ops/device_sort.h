// The workspace in which a CUDA device sorts numbered places (ops/device_sort.cuh): a rule of how
// many there are, so that a plan knows it.
#pragma once

#include <cstdint>

namespace trainrt::device_sort {

inline constexpr int64_t kAlignment = 256;  // of each of its pieces
inline constexpr int64_t kMost = (int64_t{1} << 31) - 1;

// Of n numbers of 32 bits.
inline constexpr int64_t piece_bytes(int64_t n) {
  return (4 * n + kAlignment - 1) / kAlignment * kAlignment;
}
// CUB's own, for 32-bit keys between two buffers: 256 counters of 4 bytes for each tile of at least
// 2048 keys (8064 on the architectures we build for), and histograms of each digit.
inline constexpr int64_t scratch_bytes(int64_t n) {
  return piece_bytes(n / 8) + (64 << 10);
}
// Places and positions, twice each, and CUB's.
inline constexpr int64_t bytes(int64_t n) {
  return 4 * piece_bytes(n) + scratch_bytes(n);
}

}  // namespace trainrt::device_sort
