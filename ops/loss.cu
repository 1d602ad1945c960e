// CUDA kernels of Softmax, LogSoftmax, the classification and element losses, and what counts items
// for them. ops/softmax.cc, softmax_cross_entropy.cc, nll_loss.cc, element_loss.cc, item_count.cc
// and accuracy.cc have the definitions.
//
// Losses and counts are summed in float64: teams of lanes sum blocks of items, and one team the
// blocks, whose sums lie in the workspace.
#include <cmath>
#include <limits>

#include "ops/class_axis.h"
#include "ops/element_loss.h"
#include "ops/elementwise.cuh"
#include "ops/item_blocks.h"
#include "ops/launch.cuh"
#include "ops/vector_math.h"

namespace trainrt {

namespace {

// ---- sums in blocks ----------------------------------------------------------------------------

template <typename Fn>
struct SumBlock {
  Fn of_item;
  int64_t n, block;
  double* sums;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t b) const {
    const Fn& each = of_item;
    const int64_t first = b * block, count = n - first < block ? n - first : block;
    const double sum =
        team_sum<double>(team, count, [&each, first](int64_t i) { return each(first + i); });
    if (team.leads()) {
      sums[b] = sum;
    }
  }
};

struct NumberAt {
  const double* numbers;
  TRAINRT_HOST_DEVICE double operator()(int64_t i) const { return numbers[i]; }
};

// Output 0 becomes the sum over of_item(i), i in [0, n); the workspace has a double per block.
template <typename Fn>
void sum_in_blocks(KernelContext& context, int64_t n, int64_t block, const Fn& of_item) {
  double* const sums = reinterpret_cast<double*>(context.workspace().data());
  const int64_t blocks = (n + block - 1) / block;
  launch_teams(context, blocks, block, SumBlock<Fn>{of_item, n, block, sums});
  launch_teams(
      context,
      1,
      blocks,
      SumBlock<NumberAt>{
          NumberAt{sums}, blocks, std::max<int64_t>(1, blocks), context.output<double>(0)});
}

// ---- softmax along an axis ---------------------------------------------------------------------

// A tensor seen as [outer, length, inner]; slice i begins at offset(i), its elements `inner` apart.
struct Slices {
  int64_t outer, length, inner;
  TRAINRT_HOST_DEVICE int64_t offset(int64_t i) const {
    return i / inner * length * inner + i % inner;
  }
  TRAINRT_HOST_DEVICE int64_t count() const { return outer * inner; }
};

Slices slices_of(const KernelContext& context) {
  const Shape& shape = context.input_shape(0);
  const int ndim = static_cast<int>(shape.size());
  const int axis = normalize_axis(context.attributes().get_int("axis", -1), ndim);
  return {dims_product(shape, 0, axis),
          shape[static_cast<size_t>(axis)],
          dims_product(shape, axis + 1, ndim)};
}

template <typename C>
struct Maximum {
  TRAINRT_HOST_DEVICE C operator()(C a, C b) const { return a > b ? a : b; }
};

template <typename T, bool kLog>
struct SoftmaxSlice {
  using C = ComputeOf<T>;
  Slices slices;
  const T* x;
  T* y;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t i) const {
    const T* from = x + slices.offset(i);
    T* to = y + slices.offset(i);
    const int64_t step = slices.inner;
    const C max = team.reduce(
        slices.length,
        -std::numeric_limits<C>::infinity(),
        [from, step](int64_t k) { return to_compute<C>(from[k * step]); },
        Maximum<C>{});
    const C sum = team_sum<C>(team, slices.length, [from, step, max](int64_t k) {
      return vmath::exp(to_compute<C>(from[k * step]) - max);
    });
    const C log_sum = vmath::log(sum);
    team.for_each(slices.length, [from, to, step, max, sum, log_sum](int64_t k) {
      const C shifted = to_compute<C>(from[k * step]) - max;
      to[k * step] = to_storage<T>(kLog ? shifted - log_sum : vmath::exp(shifted) / sum);
    });
  }
};

template <typename T, bool kLog>
struct SoftmaxGradSlice {
  using C = ComputeOf<T>;
  Slices slices;
  const T *y, *dy;
  T* dx;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t i) const {
    const int64_t base = slices.offset(i), step = slices.inner;
    const SoftmaxGradSlice& self = *this;
    const C sum = team_sum<C>(team, slices.length, [&self, base, step](int64_t k) {
      const C g = to_compute<C>(self.dy[base + k * step]);
      return kLog ? g : g * to_compute<C>(self.y[base + k * step]);
    });
    team.for_each(slices.length, [&self, base, step, sum](int64_t k) {
      const C g = to_compute<C>(self.dy[base + k * step]);
      const C p = to_compute<C>(self.y[base + k * step]);
      self.dx[base + k * step] = to_storage<T>(kLog ? g - vmath::exp(p) * sum : p * (g - sum));
    });
  }
};

template <bool kLog>
void softmax_cuda(KernelContext& context) {
  const Slices slices = slices_of(context);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_teams(context,
                 slices.count(),
                 slices.length,
                 SoftmaxSlice<T, kLog>{slices, context.input<T>(0), context.output<T>(0)});
  });
}

template <bool kLog>
void softmax_grad_cuda(KernelContext& context) {
  const Slices slices = slices_of(context);
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_teams(context,
                 slices.count(),
                 slices.length,
                 SoftmaxGradSlice<T, kLog>{
                     slices, context.input<T>(0), context.input<T>(1), context.output<T>(0)});
  });
}

// ---- classes -----------------------------------------------------------------------------------

// Numbers of a dtype that only the run knows: statistics are float32 beside 16-bit scores.
struct Reals {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  TRAINRT_HOST_DEVICE double operator[](int64_t i) const {
    return dtype == DType::kFloat64
               ? static_cast<const double*>(data)[i]
               : static_cast<double>(elementwise::StoredFloat<float>::load(data, dtype, i));
  }
  TRAINRT_HOST_DEVICE void set(int64_t i, double value) const {
    void* to = const_cast<void*>(data);
    if (dtype == DType::kFloat64) {
      static_cast<double*>(to)[i] = value;
    } else {
      elementwise::StoredFloat<float>::store(to, dtype, i, static_cast<float>(value));
    }
  }
};

Reals reals_in(const KernelContext& context, int i) {
  return context.has_input(i) ? Reals{context.raw_input(i), context.input_dtype(i)} : Reals{};
}
Reals reals_out(const KernelContext& context, int i) {
  return {context.raw_output(i), context.output_dtype(i)};
}

struct Labels {
  const void* data;
  bool wide;
  TRAINRT_HOST_DEVICE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i]
                : static_cast<int64_t>(static_cast<const int32_t*>(data)[i]);
  }
};

Labels labels_in(const KernelContext& context, int i) {
  dispatch_labels(context.input_dtype(i), [](auto) {});  // refuses other types
  return {context.raw_input(i), context.input_dtype(i) == DType::kInt64};
}

struct Weights {
  Reals values;
  int64_t n = 0;
  // A label outside the classes (ItemCount refuses it) weighs nothing.
  TRAINRT_HOST_DEVICE double operator[](int64_t label) const {
    return values.data == nullptr ? 1 : label >= 0 && label < n ? values[label] : 0;
  }
};

// Weights of no classes are none.
Weights weights_in(const KernelContext& context, int i) {
  const int64_t n = context.has_input(i) ? context.input_shape(i)[0] : 0;
  return {n > 0 ? reals_in(context, i) : Reals{}, n};
}

template <typename T>
struct SumExpItem {
  ClassLayout layout;
  const T* scores;
  Reals maxima, sums;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t i) const {
    using C = ComputeOf<T>;
    const T* row = scores + layout.base(i);
    const int64_t step = layout.inner;
    const C max = static_cast<C>(maxima[i]);
    const C sum = team_sum<C>(team, layout.classes, [row, step, max](int64_t v) {
      return vmath::exp(to_compute<C>(row[v * step]) - max);
    });
    if (team.leads()) {
      sums.set(i, static_cast<double>(sum));
    }
  }
};

void sum_exp_cuda(KernelContext& context) {
  const ClassLayout layout = class_layout(context.input_shape(0), context.attributes());
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_teams(
        context,
        layout.items(),
        layout.classes,
        SumExpItem<T>{layout, context.input<T>(0), reals_in(context, 1), reals_out(context, 0)});
  });
}

// The loss of one item: of softmax cross-entropy (with statistics) or of log-probabilities.
struct ItemLoss {
  ClassLayout layout;
  IgnoreIndex ignore;
  Reals scores;
  Labels labels;
  Reals maxima, sums;  // absent for log-probabilities
  Weights weights;
  TRAINRT_HOST_DEVICE double operator()(int64_t i) const {
    const int64_t label = labels[i];
    if (ignore.matches(label)) {
      return 0;
    }
    const int64_t local = label - layout.offset;
    double loss = 0;
    if (sums.data != nullptr && layout.offset == 0) {
      loss += maxima[i] + std::log(sums[i]);
    }
    if (local >= 0 && local < layout.classes) {
      loss -= scores[layout.base(i) + local * layout.inner];
    }
    return loss * weights[label];
  }
};

struct StoreItems {
  ItemLoss loss;
  Reals out;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const { out.set(i, loss(i)); }
};

template <bool kFromLogits>
void class_loss_cuda(KernelContext& context) {
  const ClassLayout layout = class_layout(context.input_shape(0), context.attributes());
  const ItemLoss loss{layout,
                      IgnoreIndex(context.attributes()),
                      reals_in(context, 0),
                      labels_in(context, 1),
                      kFromLogits ? reals_in(context, 2) : Reals{},
                      kFromLogits ? reals_in(context, 3) : Reals{},
                      weights_in(context, kFromLogits ? 4 : 2)};
  if (context.attributes().get_string("reduction", "sum") == "none") {
    launch(context, layout.items(), StoreItems{loss, reals_out(context, 0)});
  } else {
    sum_in_blocks(context, layout.items(), kItemGrain, loss);
  }
}

// upstream: a float64 scalar, or one number per item.
struct Upstream {
  Reals values;
  bool per_item;
  TRAINRT_HOST_DEVICE double operator[](int64_t i) const { return values[per_item ? i : 0]; }
};

Upstream upstream_in(const KernelContext& context, int i) {
  return {reals_in(context, i),
          context.input_dtype(i) != DType::kFloat64 || !context.input_shape(i).empty()};
}

// A row may be written over its own scores: a lane writes what it alone has read.
template <typename T>
struct CrossEntropyGradItem {
  ClassLayout layout;
  IgnoreIndex ignore;
  const T* scores;
  Labels labels;
  Reals maxima, sums;
  Upstream upstream;
  Weights weights;
  T* grad;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t i) const {
    using C = ComputeOf<T>;
    const int64_t label = labels[i], local = label - layout.offset, step = layout.inner;
    const T* row = scores + layout.base(i);
    T* to = grad + layout.base(i);
    const bool ignored = ignore.matches(label);
    const double up = ignored ? 0 : upstream[i] * weights[label];
    const C max = static_cast<C>(maxima[i]), factor = static_cast<C>(up / sums[i]);
    team.for_each(layout.classes, [=](int64_t v) {
      const C p = ignored ? C(0) : vmath::exp(to_compute<C>(row[v * step]) - max) * factor;
      to[v * step] = to_storage<T>(v == local ? p - static_cast<C>(up) : p);
    });
  }
};

void cross_entropy_grad_cuda(KernelContext& context) {
  const ClassLayout layout = class_layout(context.input_shape(0), context.attributes());
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_teams(context,
                 layout.items(),
                 layout.classes,
                 CrossEntropyGradItem<T>{layout,
                                         IgnoreIndex(context.attributes()),
                                         context.input<T>(0),
                                         labels_in(context, 1),
                                         reals_in(context, 2),
                                         reals_in(context, 3),
                                         upstream_in(context, 4),
                                         weights_in(context, 5),
                                         context.output<T>(0)});
  });
}

template <typename T>
struct NllGradElement {
  ClassLayout layout;
  IgnoreIndex ignore;
  Labels labels;
  Upstream upstream;
  Weights weights;
  T* grad;
  TRAINRT_HOST_DEVICE void operator()(int64_t element) const {
    const int64_t inner = element % layout.inner;
    const int64_t item = element / (layout.classes * layout.inner) * layout.inner + inner;
    const int64_t label = labels[item];
    const bool hit =
        !ignore.matches(label) && element / layout.inner % layout.classes == label - layout.offset;
    grad[element] = to_storage<T>(hit ? -upstream[item] * weights[label] : 0.0);
  }
};

void nll_grad_cuda(KernelContext& context) {
  const ClassLayout layout = class_layout(context.input_shape(0), context.attributes());
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.output_shape(0)),
           NllGradElement<T>{layout,
                             IgnoreIndex(context.attributes()),
                             labels_in(context, 1),
                             upstream_in(context, 2),
                             weights_in(context, 3),
                             context.output<T>(0)});
  });
}

struct FirstMaxItem {
  ClassLayout layout;
  Reals scores, maxima;
  int64_t* index;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t i) const {
    const int64_t none = std::numeric_limits<int64_t>::max(), base = layout.base(i);
    const FirstMaxItem& self = *this;
    const double max = maxima[i];
    const int64_t first = team.reduce(
        layout.classes,
        none,
        [&self, base, max, none](int64_t v) {
          return self.scores[base + v * self.layout.inner] == max ? self.layout.offset + v : none;
        },
        [](int64_t a, int64_t b) { return a < b ? a : b; });
    if (team.leads()) {
      index[i] = first;
    }
  }
};

void first_max_index_cuda(KernelContext& context) {
  const ClassLayout layout = class_layout(context.input_shape(0), context.attributes());
  launch_teams(
      context,
      layout.items(),
      layout.classes,
      FirstMaxItem{layout, reals_in(context, 0), reals_in(context, 1), context.output<int64_t>(0)});
}

// ---- counts ------------------------------------------------------------------------------------

struct IsCorrect {
  IgnoreIndex ignore;
  const int64_t* predicted;
  Labels labels;
  TRAINRT_HOST_DEVICE double operator()(int64_t i) const {
    const int64_t label = labels[i];
    return !ignore.matches(label) && label == predicted[i] ? 1.0 : 0.0;
  }
};

void correct_count_cuda(KernelContext& context) {
  sum_in_blocks(
      context,
      num_elements(context.input_shape(1)),
      kItemGrain,
      IsCorrect{
          IgnoreIndex(context.attributes()), context.input<int64_t>(0), labels_in(context, 1)});
}

// A label outside the classes makes the count NaN, which the executor reports: a device cannot
// throw.
struct WeightOfItem {
  IgnoreIndex ignore;
  Labels labels;
  Weights weights;
  int64_t classes;
  TRAINRT_HOST_DEVICE double operator()(int64_t i) const {
    const int64_t label = labels[i];
    return ignore.matches(label) ? 0.0
           : classes >= 0 && (label < 0 || label >= classes)
               ? std::numeric_limits<double>::quiet_NaN()
               : weights[label];
  }
};

struct StoreNumber {
  double value;
  double* out;
  TRAINRT_HOST_DEVICE void operator()(int64_t) const { *out = value; }
};

void item_count_cuda(KernelContext& context) {
  const int64_t n = num_elements(context.input_shape(0));
  if (is_floating(context.input_dtype(0))) {
    launch(context, 1, StoreNumber{static_cast<double>(n), context.output<double>(0)});
    return;
  }
  const Weights weights = weights_in(context, 1);
  const int64_t named = context.attributes().get_int("num_classes", -1);
  sum_in_blocks(context,
                n,
                kItemGrain,
                WeightOfItem{IgnoreIndex(context.attributes()),
                             labels_in(context, 0),
                             weights,
                             named < 0 && weights.n > 0 ? weights.n : named});
}

struct Mean {
  const double *sum, *count;
  Reals out;
  TRAINRT_HOST_DEVICE void operator()(int64_t) const { out.set(0, *sum / *count); }
};

void mean_loss_cuda(KernelContext& context) {
  launch(
      context, 1, Mean{context.input<double>(0), context.input<double>(1), reals_out(context, 0)});
}

template <typename T>
struct Shift {
  const T* ids;
  T* labels;
  int64_t length, inner;
  T ignore;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    labels[i] = i / inner % length + 1 < length ? ids[i + inner] : ignore;
  }
};

void shift_labels_cuda(KernelContext& context) {
  const Shape& shape = context.input_shape(0);
  const int ndim = static_cast<int>(shape.size());
  const int axis = normalize_axis(context.attributes().get_int("axis"), ndim);
  dispatch_labels(context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(shape),
           Shift<T>{context.input<T>(0),
                    context.output<T>(0),
                    shape[static_cast<size_t>(axis)],
                    dims_product(shape, axis + 1, ndim),
                    static_cast<T>(context.attributes().get_int("ignore_index"))});
  });
}

// ---- element by element ------------------------------------------------------------------------

template <typename Loss, typename T>
struct LossOfElement {
  const T *x, *t;
  TRAINRT_HOST_DEVICE double operator()(int64_t i) const {
    using C = ComputeOf<T>;
    return static_cast<double>(Loss::loss(to_compute<C>(x[i]), to_compute<C>(t[i])));
  }
};

template <typename Loss, typename T>
struct SlopeOfElement {
  const T *x, *t;
  const double* upstream;
  T* grad;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    using C = ComputeOf<T>;
    grad[i] = to_storage<T>(Loss::slope(to_compute<C>(x[i]), to_compute<C>(t[i])) *
                            static_cast<C>(*upstream));
  }
};

template <typename Fn>
void dispatch_kind(const Attributes& attributes, Fn&& fn) {
  const std::string& kind = attributes.get_string("kind");
  kind == "squared"    ? fn(SquaredError{})
  : kind == "absolute" ? fn(AbsoluteError{})
                       : fn(BceWithLogits{});
}

void element_loss_cuda(KernelContext& context) {
  const int64_t n = num_elements(context.input_shape(0));
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    dispatch_kind(context.attributes(), [&](auto loss) {
      using T = decltype(tag);
      sum_in_blocks(context,
                    n,
                    kElementLossBlock,
                    LossOfElement<decltype(loss), T>{context.input<T>(0), context.input<T>(1)});
    });
  });
}

void element_loss_grad_cuda(KernelContext& context) {
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    dispatch_kind(context.attributes(), [&](auto loss) {
      using T = decltype(tag);
      launch(context,
             num_elements(context.input_shape(0)),
             SlopeOfElement<decltype(loss), T>{context.input<T>(0),
                                               context.input<T>(1),
                                               context.input<double>(2),
                                               context.output<T>(0)});
    });
  });
}

const RegisterCudaKernel kSoftmax{"Softmax", softmax_cuda<false>};
const RegisterCudaKernel kLogSoftmax{"LogSoftmax", softmax_cuda<true>};
const RegisterCudaKernel kSoftmaxGrad{"SoftmaxGrad", softmax_grad_cuda<false>};
const RegisterCudaKernel kLogSoftmaxGrad{"LogSoftmaxGrad", softmax_grad_cuda<true>};
const RegisterCudaKernel kSumExp{"SumExp", sum_exp_cuda};
const RegisterCudaKernel kCrossEntropy{"SoftmaxCrossEntropyLoss", class_loss_cuda<true>};
const RegisterCudaKernel kCrossEntropyGrad{"SoftmaxCrossEntropyGrad", cross_entropy_grad_cuda};
const RegisterCudaKernel kNll{"NegativeLogLikelihoodLoss", class_loss_cuda<false>};
const RegisterCudaKernel kNllGrad{"NegativeLogLikelihoodGrad", nll_grad_cuda};
const RegisterCudaKernel kFirstMaxIndex{"FirstMaxIndex", first_max_index_cuda};
const RegisterCudaKernel kCorrectCount{"CorrectCount", correct_count_cuda};
const RegisterCudaKernel kItemCount{"ItemCount", item_count_cuda};
const RegisterCudaKernel kMeanLoss{"MeanLoss", mean_loss_cuda};
const RegisterCudaKernel kShiftLabels{"ShiftLabels", shift_labels_cuda};
const RegisterCudaKernel kElementLoss{"ElementLoss", element_loss_cuda};
const RegisterCudaKernel kElementLossGrad{"ElementLossGrad", element_loss_grad_cuda};

}  // namespace

}  // namespace trainrt
