// An output tile of 2 x 2 comes from an input patch of 4 x 4. With d the patch, g a filter and D
// the gradient of the tile:
//
//   y  = A' [(G g G') . (B' d B)] A
//   dg = G' [(A D A') . (B' d B)] G
//
// where . multiplies element by element; the gradient of x is the first form over D, with filters
// turned by 180 degrees and channels exchanged. Over channels and tiles these are one matrix
// product for each of the 16 elements: [tiles, in] x [in, out], and [in, tiles] x [tiles, out] for
// dg.
//
// Tiles are taken in blocks whose transforms stay in the second-level cache. Forward, each thread
// has buffers of its own, and which block it works on does not show in the result. The gradient of
// the filter adds up over blocks in their order, and threads share the products of a block.
#include "ops/winograd.h"

#include <algorithm>
#include <array>

#include "ops/convolution.h"
#include "ops/gemm_tile.h"

namespace trainrt {

namespace {

constexpr int64_t kLane = kVector<float>;
constexpr int64_t kPanel = 2 * kLane;       // columns of a packed panel
constexpr int64_t kForwardBytes = 1 << 20;  // of one thread's transforms
constexpr int64_t kWeightTiles = 128;       // of a block: longer sums in one register round more
// Between the matrices of two elements: a power of two would put all 16 into one set of the cache.
constexpr int64_t kGap = 5 * kLane;
constexpr int64_t kFewestTiles = 128;  // below, the filter's transform does not pay
using Vec = Vector<float>;

// One side of a convolution: an image in memory.
struct Image {
  int64_t h = 0, w = 0, c = 0;
};

// A convolution of `in` to `out`, whichever of the operators asks.
struct Tiling {
  Image in, out;
  int64_t pad_y = 0, pad_x = 0;
  int64_t n = 0, rows = 0, columns = 0;  // of tiles

  int64_t tiles() const { return n * rows * columns; }
};

template <typename Context>
Tiling tiling_of(const Context& op) {
  const Convolution conv = convolution_of(op);
  Tiling t;
  t.n = conv.n;
  t.in = {conv.input[0], conv.input[1], conv.c};
  t.out = {conv.output[0], conv.output[1], conv.m};
  t.pad_y = conv.window.pads_begin[0];
  t.pad_x = conv.window.pads_begin[1];
  if (op.node().op_type == "ConvInputGrad") {
    std::swap(t.in, t.out);
    t.pad_y = 2 - t.pad_y;
    t.pad_x = 2 - t.pad_x;
  }
  t.rows = (t.out.h + 1) / 2;
  t.columns = (t.out.w + 1) / 2;
  return t;
}

bool is_weight_grad(const std::string& op_type) {
  return op_type == "ConvWeightGrad";
}

// How the transforms of a block of tiles lie in memory: for each of the 16 elements a matrix
// [tiles, channels], a stride apart.
struct Blocks {
  int64_t tiles = 0;  // of a block
  int64_t count = 0;  // of blocks
  int64_t in_stride = 0, out_stride = 0;

  Blocks(const Tiling& t, int64_t block_tiles)
      : tiles(block_tiles),
        count((t.tiles() + block_tiles - 1) / block_tiles),
        in_stride(block_tiles * t.in.c + kGap),
        out_stride(block_tiles * t.out.c + kGap) {}

  int64_t size() const { return 16 * (in_stride + out_stride); }  // floats
};

Blocks forward_blocks(const Tiling& t) {
  const int64_t tile_bytes = 16 * (t.in.c + t.out.c) * static_cast<int64_t>(sizeof(float));
  return {t, std::clamp<int64_t>(kForwardBytes / tile_bytes / kTileRows * kTileRows, 64, 128)};
}

Blocks weight_blocks(const Tiling& t) {
  return {t, kWeightTiles};
}

int64_t num_slots(const Blocks& blocks, int threads) {
  return std::min<int64_t>(threads, blocks.count);
}

// ---- transforms --------------------------------------------------------------------------------

// Pointers to a square of kSide x kSide pixels from (y, x) on, of c channels each. Pixels outside
// the image point to a vector of zeros and do not move on with the channel.
template <int kSide>
struct Patch {
  std::array<const float*, kSide * kSide> pixels;
  std::array<int64_t, kSide * kSide> step;

  Patch(const float* image, const Image& shape, int64_t y, int64_t x) {
    alignas(64) static const float kZeros[kLane] = {};
    for (int i = 0; i < kSide * kSide; ++i) {
      const int64_t row = y + i / kSide, column = x + i % kSide;
      const bool inside = row >= 0 && row < shape.h && column >= 0 && column < shape.w;
      pixels[static_cast<size_t>(i)] = inside ? image + (row * shape.w + column) * shape.c : kZeros;
      step[static_cast<size_t>(i)] = inside ? 1 : 0;
    }
  }

  Vec at(int i, int64_t channel) const {
    return load_vector(pixels[static_cast<size_t>(i)] + step[static_cast<size_t>(i)] * channel);
  }
};

void store_vector(float* to, Vec v) {
  std::memcpy(to, &v, sizeof(v));
}

// Where tile number `tile` lies: its image, and the output pixel it begins at.
struct Place {
  int64_t image, y, x;
};

Place place_of(const Tiling& t, int64_t tile) {
  return {tile / (t.rows * t.columns), tile / t.columns % t.rows * 2, tile % t.columns * 2};
}

// B' d B of one tile; element e of channel c goes to out[e * stride + c].
void transform_input(const Tiling& t, const float* x, int64_t tile, float* out, int64_t stride) {
  const Place at = place_of(t, tile);
  const Patch<4> d(x + at.image * t.in.h * t.in.w * t.in.c, t.in, at.y - t.pad_y, at.x - t.pad_x);
  for (int64_t c = 0; c < t.in.c; c += kLane) {
    Vec rows[16];  // B' d
    unrolled<4>([&](auto j) {
      const Vec a = d.at(j, c), b = d.at(4 + j, c), e = d.at(8 + j, c), f = d.at(12 + j, c);
      rows[j] = a - e;
      rows[4 + j] = b + e;
      rows[8 + j] = e - b;
      rows[12 + j] = b - f;
    });
    unrolled<4>([&](auto i) {
      const Vec* r = rows + 4 * i;
      float* to = out + 4 * i * stride + c;
      store_vector(to, r[0] - r[2]);
      store_vector(to + stride, r[1] + r[2]);
      store_vector(to + 2 * stride, r[2] - r[1]);
      store_vector(to + 3 * stride, r[1] - r[3]);
    });
  }
}

// A D A' of one tile of the output's gradient.
void transform_output_grad(
    const Tiling& t, const float* dy, int64_t tile, float* out, int64_t stride) {
  const Place at = place_of(t, tile);
  const Patch<2> d(dy + at.image * t.out.h * t.out.w * t.out.c, t.out, at.y, at.x);
  for (int64_t c = 0; c < t.out.c; c += kLane) {
    Vec rows[8];  // A D, four rows of two
    unrolled<2>([&](auto j) {
      const Vec a = d.at(j, c), b = d.at(2 + j, c);
      rows[j] = a;
      rows[2 + j] = a + b;
      rows[4 + j] = a - b;
      rows[6 + j] = -b;
    });
    unrolled<4>([&](auto i) {
      const Vec a = rows[2 * i], b = rows[2 * i + 1];
      float* to = out + 4 * i * stride + c;
      store_vector(to, a);
      store_vector(to + stride, a + b);
      store_vector(to + 2 * stride, a - b);
      store_vector(to + 3 * stride, -b);
    });
  }
}

// y = A' m A of one tile, where m's element e of channel c is at m[e * stride + c].
void transform_output(
    const Tiling& t, const float* m, int64_t stride, int64_t tile, const float* bias, float* y) {
  const Place at = place_of(t, tile);
  const bool second_row = at.y + 1 < t.out.h, second_column = at.x + 1 < t.out.w;
  float* to = y + ((at.image * t.out.h + at.y) * t.out.w + at.x) * t.out.c;
  for (int64_t c = 0; c < t.out.c; c += kLane) {
    Vec rows[8];  // A' m, two rows of four
    unrolled<4>([&](auto j) {
      const float* from = m + j * stride + c;
      const Vec a = load_vector(from), b = load_vector(from + 4 * stride),
                e = load_vector(from + 8 * stride), f = load_vector(from + 12 * stride);
      rows[j] = a + b + e;
      rows[4 + j] = b - e - f;
    });
    const Vec shift = bias != nullptr ? load_vector(bias + c) : Vec{};
    for (int i = 0; i < (second_row ? 2 : 1); ++i) {
      const Vec* r = rows + 4 * i;
      float* row = to + i * t.out.w * t.out.c + c;
      store_vector(row, r[0] + r[1] + r[2] + shift);
      if (second_column) {
        store_vector(row + t.out.c, r[1] - r[2] - r[3] + shift);
      }
    }
  }
}

// G g G' of all filters, packed for gemm_packed: for each element [panel of out][in][kPanel].
void transform_filters(KernelContext& op, const Tiling& t, const float* w, float* packed) {
  // w is [m, c, 3, 3]; the gradient of x reads it as [c, m] and from the last tap to the first.
  const bool turned = op.node().op_type == "ConvInputGrad";
  const int64_t out_stride = 9 * (turned ? 1 : t.in.c), in_stride = 9 * (turned ? t.out.c : 1);
  const int64_t size = t.in.c * t.out.c;
  op.parallel_for(t.out.c / kPanel * t.in.c, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* filters = w + i / t.in.c * kPanel * out_stride + i % t.in.c * in_stride;
      float* to = packed + i * kPanel;
      for (int64_t first = 0; first < kPanel; first += kLane) {
        Vec g[9], rows[12];  // rows: G g, four rows of three
        for (int tap = 0; tap < 9; ++tap) {
          const float* from = filters + first * out_stride + (turned ? 8 - tap : tap);
          for (int64_t lane = 0; lane < kLane; ++lane) {
            g[tap][lane] = from[lane * out_stride];
          }
        }
        unrolled<3>([&](auto j) {
          const Vec sum = g[j] + g[6 + j];
          rows[j] = g[j];
          rows[3 + j] = (sum + g[3 + j]) * 0.5f;
          rows[6 + j] = (sum - g[3 + j]) * 0.5f;
          rows[9 + j] = g[6 + j];
        });
        unrolled<4>([&](auto k) {
          const Vec* r = rows + 3 * k;
          const Vec sum = r[0] + r[2];
          float* element = to + 4 * k * size + first;
          store_vector(element, r[0]);
          store_vector(element + size, (sum + r[1]) * 0.5f);
          store_vector(element + 2 * size, (sum - r[1]) * 0.5f);
          store_vector(element + 3 * size, r[2]);
        });
      }
    }
  });
}

// dw = G' u G, where u is [16][in][out] and dw [out, in, 3, 3]; by squares of kLane filters.
void transform_filter_grads(KernelContext& op, const Tiling& t, const float* u, float* dw) {
  const int64_t size = t.in.c * t.out.c;
  op.parallel_for(t.in.c / kLane * (t.out.c / kLane), 1, [&](int64_t begin, int64_t end) {
    for (int64_t square = begin; square < end; ++square) {
      const int64_t first_in = square / (t.out.c / kLane) * kLane;
      const int64_t first_out = square % (t.out.c / kLane) * kLane;
      float filters[kLane][kLane * 9];  // [out][in, 3, 3]
      for (int64_t in = 0; in < kLane; ++in) {
        const float* from = u + (first_in + in) * t.out.c + first_out;
        Vec rows[12], g[9];  // rows: G' u, three rows of four
        unrolled<4>([&](auto j) {
          const Vec a = load_vector(from + j * size), b = load_vector(from + (4 + j) * size),
                    e = load_vector(from + (8 + j) * size), f = load_vector(from + (12 + j) * size);
          rows[j] = a + (b + e) * 0.5f;
          rows[4 + j] = (b - e) * 0.5f;
          rows[8 + j] = (b + e) * 0.5f + f;
        });
        unrolled<3>([&](auto i) {
          const Vec* r = rows + 4 * i;
          g[3 * i] = r[0] + (r[1] + r[2]) * 0.5f;
          g[3 * i + 1] = (r[1] - r[2]) * 0.5f;
          g[3 * i + 2] = (r[1] + r[2]) * 0.5f + r[3];
        });
        for (int64_t out = 0; out < kLane; ++out) {
          for (int tap = 0; tap < 9; ++tap) {
            filters[out][in * 9 + tap] = g[tap][out];
          }
        }
      }
      for (int64_t out = 0; out < kLane; ++out) {
        std::memcpy(
            dw + ((first_out + out) * t.in.c + first_in) * 9, filters[out], sizeof(filters[out]));
      }
    }
  });
}

// ---- the operators ---------------------------------------------------------------------------

// Workspace: the filters, then per thread the transforms of a block's input and output.
void run_forward(KernelContext& op) {
  const Tiling t = tiling_of(op);
  const float* x = op.input<float>(0);
  const float* bias = op.input<float>(2);
  float* y = op.output<float>(0);
  float* filters = reinterpret_cast<float*>(op.workspace().data());
  float* buffers = filters + 16 * t.in.c * t.out.c;
  transform_filters(op, t, op.input<float>(1), filters);
  const Blocks blocks = forward_blocks(t);
  const int64_t slots = num_slots(blocks, op.device().spec().threads);
  op.parallel_for(slots, 1, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      float* in = buffers + slot * blocks.size();
      float* out = in + 16 * blocks.in_stride;
      for (int64_t b = slot; b < blocks.count; b += slots) {
        const int64_t first = b * blocks.tiles, count = std::min(blocks.tiles, t.tiles() - first);
        for (int64_t i = 0; i < count; ++i) {
          transform_input(t, x, first + i, in + i * t.in.c, blocks.in_stride);
        }
        for (int64_t e = 0; e < 16; ++e) {
          gemm_packed<float>({in + e * blocks.in_stride, t.in.c, 1},
                             filters + e * t.in.c * t.out.c,
                             out + e * blocks.out_stride,
                             t.out.c,
                             count,
                             t.out.c,
                             t.in.c);
        }
        for (int64_t i = 0; i < count; ++i) {
          transform_output(t, out + i * t.out.c, blocks.out_stride, first + i, bias, y);
        }
      }
    }
  });
}

// Workspace: the transformed gradient, then the transforms of a block's input and output gradient.
void run_weight_grad(KernelContext& op) {
  const Tiling t = tiling_of(op);
  const float* x = op.input<float>(0);
  const float* dy = op.input<float>(1);
  const Blocks blocks = weight_blocks(t);
  float* grads = reinterpret_cast<float*>(op.workspace().data());
  float* in = grads + 16 * t.in.c * t.out.c;
  float* out = in + 16 * blocks.in_stride;
  for (int64_t first = 0; first < t.tiles(); first += blocks.tiles) {
    const int64_t count = std::min(blocks.tiles, t.tiles() - first);
    op.parallel_for(count, kTileRows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        transform_input(t, x, first + i, in + i * t.in.c, blocks.in_stride);
        transform_output_grad(t, dy, first + i, out + i * t.out.c, blocks.out_stride);
      }
    });
    const int64_t panels = t.out.c / kPanel;
    op.parallel_for(16 * panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t e = i / panels, column = i % panels * kPanel;
        gemm_small<float>({in + e * blocks.in_stride, 1, t.in.c},
                          out + e * blocks.out_stride + column,
                          t.out.c,
                          grads + e * t.in.c * t.out.c + column,
                          t.out.c,
                          t.in.c,
                          kPanel,
                          count,
                          first > 0);
      }
    });
  }
  transform_filter_grads(op, t, grads, op.output<float>(0));
}

}  // namespace

bool winograd_applies(const OpContext& op) {
  const Convolution conv = convolution_of(op);
  const Window& w = conv.window;
  const Shape ones = {1, 1};
  const auto small_pads = [](const Shape& pads) {
    return *std::max_element(pads.begin(), pads.end()) <= 2;
  };
  return op.input_dtype(0) == DType::kFloat32 && w.channels_last && w.kernel == Shape{3, 3} &&
         w.strides == ones && w.dilations == ones && conv.group == 1 && conv.c % kPanel == 0 &&
         conv.m % kPanel == 0 && small_pads(w.pads_begin) && small_pads(w.pads_end) &&
         tiling_of(op).tiles() >= kFewestTiles;
}

int64_t winograd_workspace(const OpContext& op, const DeviceSpec& spec) {
  const Tiling t = tiling_of(op);
  const bool forward = !is_weight_grad(op.node().op_type);
  const Blocks blocks = forward ? forward_blocks(t) : weight_blocks(t);
  const int64_t slots = forward ? num_slots(blocks, spec.threads) : 1;
  return (16 * t.in.c * t.out.c + slots * blocks.size()) * static_cast<int64_t>(sizeof(float));
}

void winograd_convolution(KernelContext& op) {
  is_weight_grad(op.node().op_type) ? run_weight_grad(op) : run_forward(op);
}

}  // namespace trainrt
