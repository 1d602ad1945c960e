#include "parallel/reduce_in_order.h"

#include <algorithm>
#include <array>

namespace trainrt {

namespace {

constexpr int64_t kBlock = 1024;  // elements summed on the stack before they are written

template <typename T>
struct SumType {
  using type = T;
};
template <>
struct SumType<Float16> {
  using type = float;
};
template <>
struct SumType<BFloat16> {
  using type = float;
};
template <>
struct SumType<bool> {
  using type = int;
};

template <typename T>
void reduce_block(const std::vector<const void*>& inputs,
                  const std::vector<void*>& outputs,
                  int64_t begin,
                  int64_t count,
                  ReductionKind reduction) {
  using S = typename SumType<T>::type;
  std::array<S, kBlock> sums;
  const T* first = static_cast<const T*>(inputs[0]) + begin;
  for (int64_t i = 0; i < count; ++i) {
    sums[static_cast<size_t>(i)] = static_cast<S>(first[i]);
  }
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    const T* next = static_cast<const T*>(inputs[rank]) + begin;
    for (int64_t i = 0; i < count; ++i) {
      S& sum = sums[static_cast<size_t>(i)];
      const S value = static_cast<S>(next[i]);
      switch (reduction) {
        case ReductionKind::kSum:
          sum = static_cast<S>(sum + value);
          break;
        case ReductionKind::kMax:
          sum = std::max(sum, value);
          break;
        case ReductionKind::kMin:
          sum = std::min(sum, value);
          break;
      }
    }
  }
  for (void* output : outputs) {
    T* out = static_cast<T*>(output) + begin;
    for (int64_t i = 0; i < count; ++i) {
      out[i] = static_cast<T>(sums[static_cast<size_t>(i)]);
    }
  }
}

}  // namespace

void reduce_in_order(const std::vector<const void*>& inputs,
                     const std::vector<void*>& outputs,
                     int64_t begin,
                     int64_t end,
                     DType dtype,
                     ReductionKind reduction) {
  dispatch_all(dtype, [&](auto tag) {
    for (int64_t at = begin; at < end; at += kBlock) {
      reduce_block<decltype(tag)>(inputs, outputs, at, std::min(kBlock, end - at), reduction);
    }
  });
}

}  // namespace trainrt
