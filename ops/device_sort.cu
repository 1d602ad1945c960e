#include <algorithm>
#include <numeric>
#include <vector>

#include "ops/device_sort.cuh"
#ifdef __CUDACC__
#include <cub/device/device_radix_sort.cuh>
#endif

namespace trainrt::device_sort {

Buffers::Buffers(const KernelContext& context, int64_t num_positions, int64_t num_places)
    : n(num_positions) {
  for (const int64_t number : {num_positions, num_places}) {
    TRAINRT_REQUIRE(number < kMost,
                    kUnsupported,
                    "node '",
                    context.node().name,
                    "' (",
                    context.node().op_type,
                    "): ",
                    number,
                    number == num_positions ? " indices" : " places",
                    "; CUDA takes fewer than ",
                    kMost,
                    ". Use a smaller --micro-batch-size");
  }
  TRAINRT_CHECK(static_cast<int64_t>(context.workspace().size()) >= bytes(n), context.node().name);
  std::byte* at = context.workspace().data();
  for (uint32_t** piece : {&places[0], &places[1], &positions[0], &positions[1]}) {
    *piece = reinterpret_cast<uint32_t*>(at);
    at += piece_bytes(n);
  }
  scratch = at;
}

#ifdef __CUDACC__

Sorted sort(KernelContext& context, const Buffers& buffers, int64_t num_places) {
  cub::DoubleBuffer<uint32_t> places(buffers.places[0], buffers.places[1]);
  cub::DoubleBuffer<uint32_t> positions(buffers.positions[0], buffers.positions[1]);
  int bits = 1;
  while ((num_places - 1) >> bits > 0) {
    ++bits;
  }
  if (buffers.n > 0) {
    const cudaStream_t stream = cuda_context(context).cuda_stream();
    const int n = static_cast<int>(buffers.n);
    size_t wanted = 0;
    TRAINRT_CUDA_CHECK(
        cub::DeviceRadixSort::SortPairs(nullptr, wanted, places, positions, n, 0, bits, stream));
    size_t scratch = static_cast<size_t>(scratch_bytes(buffers.n));
    TRAINRT_CHECK(wanted <= scratch, "CUB sorts ", n, " keys in ", wanted, " bytes");
    TRAINRT_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(
        buffers.scratch, scratch, places, positions, n, 0, bits, stream));
  }
  return {places.Current(), positions.Current(), buffers.n};
}

#else  // the test double

Sorted sort(KernelContext& context, const Buffers& buffers, int64_t) {
  if (buffers.n > 0) {
    TRAINRT_CUDA_CHECK(
        trainrt_double_launch(cuda_context(context).cuda_stream(), buffers.n, [buffers] {
          std::vector<uint32_t> order(buffers.positions[0], buffers.positions[0] + buffers.n);
          std::stable_sort(order.begin(), order.end(), [&buffers](uint32_t a, uint32_t b) {
            return buffers.places[0][a] < buffers.places[0][b];
          });
          for (size_t k = 0; k < order.size(); ++k) {
            buffers.places[1][k] = buffers.places[0][order[k]];
            buffers.positions[1][k] = order[k];
          }
        }));
  }
  return {buffers.places[1], buffers.positions[1], buffers.n};
}

#endif

}  // namespace trainrt::device_sort
