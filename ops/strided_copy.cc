// Dims are reordered by the destination's strides and merged; then the innermost dim decides. Equal
// unit strides: memcpy per row. A source whose unit stride is in another dim: that dim and the
// destination's innermost one are copied in square tiles that stay in the first-level cache
// (transposition). Anything else: a strided loop per row.
#include "ops/strided_copy.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "ops/broadcast.h"

#ifdef __AVX__
#include <immintrin.h>
#endif

namespace trainrt {

namespace {

constexpr int64_t kGrainBytes = 1 << 17;
constexpr int64_t kTile = 32;

struct Copy {
  BroadcastLoops loops;  // operand 0: destination, 1: source
  std::byte* to;
  const std::byte* from;
};

template <typename Word>
void copy_row(Word* to, int64_t to_stride, const Word* from, int64_t from_stride, int64_t n) {
  if (to_stride == 1 && from_stride == 1) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(Word));
  } else if (to_stride == 1 && from_stride == 0) {
    std::fill_n(to, n, *from);
  } else if (to_stride == 1) {
    for (int64_t i = 0; i < n; ++i) {
      to[i] = from[i * from_stride];
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      to[i * to_stride] = from[i * from_stride];
    }
  }
}

// Rows, cut also along the row when there are few of them.
template <typename Word>
void copy_rows(KernelContext& context, const Copy& copy) {
  const BroadcastLoops& loops = copy.loops;
  const int64_t inner = loops.inner();
  int64_t total = 1;
  for (int d = 0; d < loops.ndim; ++d) {
    total *= loops.dims[static_cast<size_t>(d)];
  }
  const int64_t grain = kGrainBytes / static_cast<int64_t>(sizeof(Word));
  context.parallel_for(total, grain, [&copy, inner](int64_t begin, int64_t end) {
    RowCursor row(copy.loops, begin / inner);
    int64_t column = begin % inner;
    const int64_t to_stride = copy.loops.inner_stride(0);
    const int64_t from_stride = copy.loops.inner_stride(1);
    for (int64_t index = begin; index < end;) {
      const int64_t n = std::min(inner - column, end - index);
      copy_row(reinterpret_cast<Word*>(copy.to) + row.offset(0) + column * to_stride,
               to_stride,
               reinterpret_cast<const Word*>(copy.from) + row.offset(1) + column * from_stride,
               from_stride,
               n);
      index += n;
      column = 0;
      row.next();
    }
  });
}

// block[r][c] = from[c * stride + r] for a full tile. Columns are read in groups whose pieces of
// the tile's rows are then in registers or the first-level cache.
template <typename Word>
void transpose_tile(Word (&block)[kTile][kTile], const Word* from, int64_t stride) {
  for (int64_t c = 0; c < kTile; ++c) {
    for (int64_t r = 0; r < kTile; ++r) {
      block[r][c] = from[c * stride + r];
    }
  }
}

#ifdef __AVX__
// 8 x 8 words by three rounds of shuffles: pairs, quadruples, halves of the register.
void transpose_8x8(float* to, int64_t to_stride, const float* from, int64_t from_stride) {
  __m256 in[8], pairs[8], quads[8];
  for (int i = 0; i < 8; ++i) {
    in[i] = _mm256_loadu_ps(from + i * from_stride);
  }
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(in[i], in[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(in[i], in[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
    quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
    quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
    quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride,
                     _mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31));
  }
}

// Only moves bits, so that integers may pass as floats.
void transpose_tile(uint32_t (&block)[kTile][kTile], const uint32_t* from, int64_t stride) {
  for (int64_t c = 0; c < kTile; c += 8) {
    for (int64_t r = 0; r < kTile; r += 8) {
      transpose_8x8(reinterpret_cast<float*>(&block[r][c]),
                    kTile,
                    reinterpret_cast<const float*>(from + c * stride + r),
                    stride);
    }
  }
}
#endif

// One tile of the last two dims (a, b), which have destination strides (x, 1) and source strides
// (1, y).
template <typename Word>
void copy_tile(Word* to,
               int64_t to_stride,
               const Word* from,
               int64_t from_stride,
               int64_t num_rows,
               int64_t num_columns) {
  alignas(64) Word block[kTile][kTile];
  if (num_rows == kTile && num_columns == kTile) {
    transpose_tile(block, from, from_stride);
  } else {
    for (int64_t c = 0; c < num_columns; ++c) {
      for (int64_t r = 0; r < num_rows; ++r) {
        block[r][c] = from[c * from_stride + r];
      }
    }
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    std::memcpy(to + r * to_stride, block[r], static_cast<size_t>(num_columns) * sizeof(Word));
  }
}

template <typename Word>
void copy_transposed(KernelContext& context, const Copy& copy) {
  const BroadcastLoops& loops = copy.loops;
  const int64_t rows = loops.dims[static_cast<size_t>(loops.ndim - 2)];
  const int64_t columns = loops.inner();
  int64_t outer = 1;
  for (int d = 0; d < loops.ndim - 2; ++d) {
    outer *= loops.dims[static_cast<size_t>(d)];
  }
  const int64_t row_tiles = (rows + kTile - 1) / kTile;
  const int64_t tile_bytes = kTile * columns * static_cast<int64_t>(sizeof(Word));
  const int64_t grain = std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, tile_bytes));
  context.parallel_for(outer * row_tiles, grain, [&](int64_t begin, int64_t end) {
    const int64_t to_stride = loops.strides[0][static_cast<size_t>(loops.ndim - 2)];
    const int64_t from_stride = loops.inner_stride(1);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first_row = tile % row_tiles * kTile;
      const RowCursor cursor(loops, tile / row_tiles * rows + first_row);
      Word* to = reinterpret_cast<Word*>(copy.to) + cursor.offset(0);
      const Word* from = reinterpret_cast<const Word*>(copy.from) + cursor.offset(1);
      for (int64_t first = 0; first < columns; first += kTile) {
        copy_tile(to + first,
                  to_stride,
                  from + first * from_stride,
                  from_stride,
                  std::min(kTile, rows - first_row),
                  std::min(kTile, columns - first));
      }
    }
  });
}

template <typename Word>
void copy_words(KernelContext& context, Copy& copy) {
  BroadcastLoops& loops = copy.loops;
  const int last = loops.ndim - 1;
  if (loops.inner_stride(0) == 1 && loops.inner_stride(1) != 1 && loops.inner() >= 4) {
    for (int d = last - 1; d >= 0; --d) {
      const size_t dim = static_cast<size_t>(d);
      if (loops.strides[1][dim] == 1 && loops.dims[dim] >= 4 && loops.inner_stride(1) != 0) {
        // Bring the source's unit dim next to the innermost one; outer dims may come in any order.
        for (size_t i = dim; i + 1 < static_cast<size_t>(last); ++i) {
          std::swap(loops.dims[i], loops.dims[i + 1]);
          std::swap(loops.strides[0][i], loops.strides[0][i + 1]);
          std::swap(loops.strides[1][i], loops.strides[1][i + 1]);
        }
        return copy_transposed<Word>(context, copy);
      }
    }
  }
  copy_rows<Word>(context, copy);
}

}  // namespace

void strided_copy(KernelContext& context,
                  int64_t element_bytes,
                  const Shape& dims,
                  const StridedView& to,
                  const StridedView& from) {
  if (num_elements(dims) == 0) {
    return;
  }
  std::vector<size_t> order(dims.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::abs(to.strides[a]) > std::abs(to.strides[b]);
  });
  Shape sorted_dims;
  std::array<Shape, 2> strides;
  for (const size_t d : order) {
    sorted_dims.push_back(dims[d]);
    strides[0].push_back(to.strides[d]);
    strides[1].push_back(from.strides[d]);
  }
  Copy copy{merge_loops(sorted_dims, strides),
            static_cast<std::byte*>(to.base),
            static_cast<const std::byte*>(from.base)};
  switch (element_bytes) {
    case 1:
      return copy_words<uint8_t>(context, copy);
    case 2:
      return copy_words<uint16_t>(context, copy);
    case 4:
      return copy_words<uint32_t>(context, copy);
    default:
      TRAINRT_CHECK(element_bytes == 8);
      return copy_words<uint64_t>(context, copy);
  }
}

void copy_kernel(KernelContext& context) {
  const std::byte* from = static_cast<const std::byte*>(context.raw_input(0));
  std::byte* to = static_cast<std::byte*>(context.raw_output(0));
  if (from == to) {
    return;
  }
  context.parallel_for(
      context.output_type(0).bytes(), kGrainBytes, [=](int64_t begin, int64_t end) {
        std::memcpy(to + begin, from + begin, static_cast<size_t>(end - begin));
      });
}

void clear_output(KernelContext& context) {
  std::byte* to = static_cast<std::byte*>(context.raw_output(0));
  context.parallel_for(
      context.output_type(0).bytes(), kGrainBytes, [to](int64_t begin, int64_t end) {
        std::memset(to + begin, 0, static_cast<size_t>(end - begin));
      });
}

}  // namespace trainrt
