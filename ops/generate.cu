// CUDA kernels of operators that make or select elements by position: Dropout and random tensors,
// Fill, Cast, OneHot, Trilu, ReverseSequence.
#include <cmath>
#include <tuple>
#include <type_traits>

#include "graph/convert_number.h"
#include "ops/elementwise.cuh"
#include "ops/launch.cuh"
#include "ops/random_draw.cuh"

namespace trainrt {

namespace {

template <typename T>
bool is_pack_aligned(const T* data) {
  return reinterpret_cast<uintptr_t>(data) % sizeof(elementwise::Pack<T>) == 0;
}

// ---- random numbers ----------------------------------------------------------------------------

// A pack of elements, whose draws are one block of random numbers as a rule. `kWhole`: packs lie
// aligned.
template <typename T, bool kWhole>
struct DropPack {
  DeviceDraws draws;
  const T* x;
  T* y;
  bool* mask;
  int64_t n;
  uint32_t limit;
  ComputeOf<T> scale;
  TRAINRT_HOST_DEVICE void operator()(int64_t pack) const {
    using C = ComputeOf<T>;
    constexpr int kPack = elementwise::kPack;
    static_assert(kPack == std::tuple_size_v<RandomBlock>);
    const int64_t first = pack * kPack;
    const RandomBlock words = draws.four(first);
    elementwise::Pack<T> from, to;
    elementwise::Pack<bool> kept;
    const bool whole = kWhole && first + kPack <= n;
    if (whole) {
      from = *reinterpret_cast<const elementwise::Pack<T>*>(x + first);
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (first + j < n) {
        kept.values[j] = words[j] >= limit;
        const C value = to_compute<C>(whole ? from.values[j] : x[first + j]);
        to.values[j] = to_storage<T>(kept.values[j] ? value * scale : C(0));
      }
    }
    if (whole) {
      *reinterpret_cast<elementwise::Pack<T>*>(y + first) = to;
      if (mask != nullptr) {
        *reinterpret_cast<elementwise::Pack<bool>*>(mask + first) = kept;
      }
      return;
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      if (first + j < n) {
        y[first + j] = to.values[j];
        if (mask != nullptr) {
          mask[first + j] = kept.values[j];
        }
      }
    }
  }
};

void dropout_cuda(KernelContext& context) {
  const double ratio = context.attributes().get_float("ratio", 0.5);
  const int64_t n = num_elements(context.input_shape(0));
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const T* x = context.input<T>(0);
    T* y = context.output<T>(0);
    bool* mask = context.output<bool>(1);
    const auto run = [&]<bool kWhole>(std::bool_constant<kWhole>) {
      launch(context,
             (n + elementwise::kPack - 1) / elementwise::kPack,
             DropPack<T, kWhole>{DeviceDraws(draw_source(context, context.input_shape(0))),
                                 x,
                                 y,
                                 mask,
                                 n,
                                 drop_threshold(ratio),
                                 static_cast<ComputeOf<T>>(drop_scale(ratio))});
    };
    if (is_pack_aligned(x) && is_pack_aligned(y) && is_pack_aligned(mask)) {
      run(std::true_type{});
    } else {
      run(std::false_type{});
    }
  });
}

struct Uniform {
  explicit Uniform(const Attributes& a)
      : low(a.get_float("low", 0)), width(a.get_float("high", 1) - low) {}
  TRAINRT_HOST_DEVICE double operator()(uint32_t word) const {
    return low + width * static_cast<double>(uniform_float(word));
  }
  double low, width;
};

// Box-Muller wants two words: the second is the first, mixed.
struct Normal {
  explicit Normal(const Attributes& a)
      : mean(a.get_float("mean", 0)), scale(a.get_float("scale", 1)) {}
  TRAINRT_HOST_DEVICE double operator()(uint32_t word) const {
    const uint32_t second = static_cast<uint32_t>(mix_keys(word, 1) >> 32);
    const double u = (static_cast<double>(word) + 1.0) * 0x1p-32;
    const double v = static_cast<double>(second) * 0x1p-32;
    return mean + scale * (std::sqrt(-2.0 * std::log(u)) * std::cos(6.283185307179586477 * v));
  }
  double mean, scale;
};

template <typename Distribution, typename T>
struct DrawElement {
  DeviceDraws draws;
  Distribution distribution;
  T* y;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    y[i] = to_storage<T>(distribution(draws(i)));
  }
};

template <typename Distribution>
void random_cuda(KernelContext& context) {
  dispatch_stored(context.node(), context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           DrawElement<Distribution, T>{DeviceDraws(draw_source(context, context.output_shape(0))),
                                        Distribution(context.attributes()),
                                        context.output<T>(0)});
  });
}

template <typename T, typename Out>
struct BernoulliElement {
  DeviceDraws draws;
  const T* p;
  Out* y;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    y[i] = to_storage<Out>(uniform_float(draws(i)) < to_compute<float>(p[i]) ? 1.0f : 0.0f);
  }
};

void bernoulli_cuda(KernelContext& context) {
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    dispatch_all(context.output_dtype(0), [&](auto out_tag) {
      using T = decltype(tag);
      using Out = decltype(out_tag);
      launch(context,
             num_elements(context.output_shape(0)),
             BernoulliElement<T, Out>{DeviceDraws(draw_source(context, context.output_shape(0))),
                                      context.input<T>(0),
                                      context.output<Out>(0)});
    });
  });
}

// ---- one value, another type -------------------------------------------------------------------

template <typename T>
struct FillElement {
  T value;
  T* out;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const { out[i] = value; }
};

void fill_cuda(KernelContext& context) {
  const double value = context.attributes().get_float("value");
  dispatch_all(context.output_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           FillElement<T>{convert_number<T>(value), context.output<T>(0)});
  });
}

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;

template <typename From, typename To>
struct CastElement {
  const From* from;
  To* to;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    if constexpr (kIsHalf<From>) {
      to[i] = convert(to_compute<float>(from[i]));
    } else {
      to[i] = convert(from[i]);
    }
  }

 private:
  template <typename C>
  TRAINRT_HOST_DEVICE static To convert(C value) {
    if constexpr (kIsHalf<To>) {
      return to_storage<To>(value);
    } else {
      return convert_number<To>(value);
    }
  }
};

// Several elements in one load and one store, as parameters and their gradients are cast in every
// step.
template <typename From, typename To>
struct CastPack {
  const From* from;
  To* to;
  int64_t n;
  TRAINRT_HOST_DEVICE void operator()(int64_t pack) const {
    constexpr int kPack = elementwise::kPack;
    const int64_t first = pack * kPack;
    if (first + kPack > n) {
      for (int64_t i = first; i < n; ++i) {
        CastElement<From, To>{from, to}(i);
      }
      return;
    }
    const auto loaded = *reinterpret_cast<const elementwise::Pack<From>*>(from + first);
    elementwise::Pack<To> result;
    for (int i = 0; i < kPack; ++i) {
      CastElement<From, To>{loaded.values, result.values}(i);
    }
    *reinterpret_cast<elementwise::Pack<To>*>(to + first) = result;
  }
};

template <typename T>
constexpr bool kIsStoredFloat = std::is_floating_point_v<T> || kIsHalf<T>;

void cast_cuda(KernelContext& context) {
  const int64_t n = num_elements(context.output_shape(0));
  dispatch_all(context.input_dtype(0), [&](auto from_tag) {
    dispatch_all(context.output_dtype(0), [&](auto to_tag) {
      using From = decltype(from_tag);
      using To = decltype(to_tag);
      const From* from = context.input<From>(0);
      To* to = context.output<To>(0);
      if constexpr (kIsStoredFloat<From> && kIsStoredFloat<To>) {
        if (is_pack_aligned(from) && is_pack_aligned(to)) {
          launch(context,
                 (n + elementwise::kPack - 1) / elementwise::kPack,
                 CastPack<From, To>{from, to, n});
          return;
        }
      }
      launch(context, n, CastElement<From, To>{from, to});
    });
  });
}

// ---- by position -------------------------------------------------------------------------------

struct OneHotIndex {
  const void* data;
  DType dtype;
  TRAINRT_HOST_DEVICE int64_t operator[](int64_t i) const {
    switch (dtype) {
      case DType::kFloat64:
        return convert_number<int64_t>(static_cast<const double*>(data)[i]);
      case DType::kFloat32:
      case DType::kFloat16:
      case DType::kBFloat16:
        return convert_number<int64_t>(elementwise::StoredFloat<float>::load(data, dtype, i));
      default:
        return elementwise::StoredInteger<int64_t>::load(data, dtype, i);
    }
  }
};

template <typename Word>
struct OneHotElement {
  OneHotIndex indices;
  const Word* values;  // off, on
  Word* out;
  int64_t depth, inner;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    int64_t index = indices[i / (depth * inner) * inner + i % inner];
    index += index < 0 ? depth : 0;
    out[i] = values[index == i / inner % depth ? 1 : 0];
  }
};

void one_hot_cuda(KernelContext& context) {
  const Shape& out = context.output_shape(0);
  const int ndim = static_cast<int>(out.size());
  const int axis = normalize_axis(context.attributes().get_int("axis", -1), ndim);
  dispatch_word(context.output_dtype(0), [&](auto tag) {
    using Word = decltype(tag);
    launch(context,
           num_elements(out),
           OneHotElement<Word>{{context.raw_input(0), context.input_dtype(0)},
                               static_cast<const Word*>(context.raw_input(1)),
                               static_cast<Word*>(context.raw_output(0)),
                               context.attributes().get_int("depth"),
                               dims_product(out, axis + 1, ndim)});
  });
}

template <typename Word>
struct TriluElement {
  const Word* in;
  Word* out;
  int64_t rows, columns, k;
  bool upper;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t column = i % columns, row = i / columns % rows;
    const bool kept = upper ? column - row >= k : column - row <= k;
    out[i] = kept ? in[i] : Word(0);
  }
};

void trilu_cuda(KernelContext& context) {
  const Shape& shape = context.input_shape(0);
  dispatch_word(context.output_dtype(0), [&](auto tag) {
    using Word = decltype(tag);
    launch(context,
           num_elements(shape),
           TriluElement<Word>{static_cast<const Word*>(context.raw_input(0)),
                              static_cast<Word*>(context.raw_output(0)),
                              shape[shape.size() - 2],
                              shape[shape.size() - 1],
                              context.attributes().get_int("k", 0),
                              context.attributes().get_int("upper", 1) != 0});
  });
}

template <typename Word>
struct ReverseElement {
  const Word* in;
  Word* out;
  const int64_t* lengths;
  int64_t steps, samples, row;
  bool batch_first;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const int64_t line = i / row;
    const int64_t sample = batch_first ? line / steps : line % samples;
    const int64_t step = batch_first ? line % steps : line / samples;
    const int64_t length = lengths[sample] < steps ? lengths[sample] : steps;
    const int64_t from = step < length ? length - 1 - step : step;
    const int64_t source = batch_first ? sample * steps + from : from * samples + sample;
    out[i] = in[source * row + i % row];
  }
};

void reverse_sequence_cuda(KernelContext& context) {
  const Shape& shape = context.input_shape(0);
  const int64_t batch_axis = context.attributes().get_int("batch_axis");
  dispatch_word(context.output_dtype(0), [&](auto tag) {
    using Word = decltype(tag);
    launch(context,
           num_elements(shape),
           ReverseElement<Word>{static_cast<const Word*>(context.raw_input(0)),
                                static_cast<Word*>(context.raw_output(0)),
                                context.input<int64_t>(1),
                                shape[static_cast<size_t>(1 - batch_axis)],
                                shape[static_cast<size_t>(batch_axis)],
                                dims_product(shape, 2, static_cast<int>(shape.size())),
                                batch_axis == 0});
  });
}

const RegisterCudaKernel kDropout{"Dropout", dropout_cuda};
const RegisterCudaKernel kUniform{"RandomUniform", random_cuda<Uniform>};
const RegisterCudaKernel kNormal{"RandomNormal", random_cuda<Normal>};
const RegisterCudaKernel kBernoulli{"Bernoulli", bernoulli_cuda};
const RegisterCudaKernel kFill{"Fill", fill_cuda};
const RegisterCudaKernel kCast{"Cast", cast_cuda};
const RegisterCudaKernel kOneHot{"OneHot", one_hot_cuda};
const RegisterCudaKernel kTrilu{"Trilu", trilu_cuda};
const RegisterCudaKernel kReverseSequence{"ReverseSequence", reverse_sequence_cuda};

}  // namespace

}  // namespace trainrt
