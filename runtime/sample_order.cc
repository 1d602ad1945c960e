// A Feistel network over the smallest even number of bits that covers n, walked until it lands
// below n (cycle walking): a bijection of [0, n) with less than four rounds of walking on average.
#include "runtime/sample_order.h"

#include <algorithm>

#include "graph/base/error.h"
#include "graph/random.h"

namespace trainrt {

int64_t shuffled_index(uint64_t seed, int64_t epoch, int64_t n, int64_t index) {
  TRAINRT_CHECK(index >= 0 && index < n);
  int half_bits = 1;
  while (half_bits < 31 && (int64_t{1} << (2 * half_bits)) < n) {
    ++half_bits;
  }
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  const uint64_t key = mix_keys(mix_keys(seed, 0x5348554646), static_cast<uint64_t>(epoch));
  uint64_t x = static_cast<uint64_t>(index);
  do {
    uint64_t left = x >> half_bits;
    uint64_t right = x & mask;
    for (uint64_t round = 0; round < 6; ++round) {
      const uint64_t next = left ^ (mix_keys(key + round, right) & mask);
      left = right;
      right = next;
    }
    x = left << half_bits | right;
  } while (x >= static_cast<uint64_t>(n));
  return static_cast<int64_t>(x);
}

int64_t samples_at(int64_t position, int64_t batch, int64_t n) {
  return std::min(batch, n - position % n);
}

}  // namespace trainrt
