// CUDA kernels of what is kept over the micro-batches of a step: sums along a tree
// (ops/accumulate_tree.cc) and rows of running statistics (ops/fold_average.cc).
#include <algorithm>

#include "ops/elementwise.cuh"
#include "ops/launch.cuh"

namespace trainrt {

namespace {

constexpr int64_t kMaxPlaces = 1024;  // micro-batches or subtrees: what a kernel's parameters hold
constexpr int kMaxDepth = 40;

void require_places(const KernelContext& context, size_t count) {
  TRAINRT_REQUIRE(static_cast<int64_t>(count) <= kMaxPlaces,
                  kUnsupported,
                  "node '",
                  context.node().name,
                  "' (",
                  context.node().op_type,
                  "): ",
                  count,
                  " micro-batches; CUDA takes up to ",
                  kMaxPlaces,
                  ". Use a larger --micro-batch-size");
}

// What a micro-batch does to the stack of slots.
struct Place {
  uint8_t slot, first, merges;
};

template <typename T>
struct AccumulateTree {
  using C = ComputeOf<T>;
  const T* term;
  T* slots;
  int64_t size;
  const int64_t* micro_batch;
  Place places[kMaxPlaces];
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    const Place place = places[*micro_batch];
    T* top = slots + place.slot * size + i;
    *top = place.first != 0 ? term[i] : to_storage<T>(to_compute<C>(*top) + to_compute<C>(term[i]));
    for (int merge = 0; merge < place.merges; ++merge, top -= size) {
      T* left = top - size;
      *left = to_storage<T>(to_compute<C>(*left) + to_compute<C>(*top));
    }
  }
};

void accumulate_tree_cuda(KernelContext& context) {
  const std::vector<int64_t>& slot = context.attributes().get_ints("slot");
  const std::vector<int64_t>& first = context.attributes().get_ints("first");
  const std::vector<int64_t>& merges = context.attributes().get_ints("merges");
  require_places(context, slot.size());
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const int64_t size = num_elements(context.input_shape(1));
    AccumulateTree<T> functor{
        context.input<T>(1), context.output<T>(0), size, context.input<int64_t>(2), {}};
    for (size_t i = 0; i < slot.size(); ++i) {
      functor.places[i] = {static_cast<uint8_t>(slot[i]),
                           static_cast<uint8_t>(first.at(i)),
                           static_cast<uint8_t>(merges.at(i))};
    }
    launch(context, size, functor);
  });
}

template <typename T>
struct TreeSum {
  using C = ComputeOf<T>;
  const T* subtrees;
  T* out;
  int64_t size, count;
  uint8_t merges[kMaxPlaces];
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    C stack[kMaxDepth] = {};
    int depth = 0;
    for (int64_t j = 0; j < count; ++j) {
      stack[depth++] = to_compute<C>(subtrees[j * size + i]);
      for (int merge = 0; merge < merges[j]; ++merge) {
        --depth;
        stack[depth - 1] += stack[depth];
      }
    }
    out[i] = to_storage<T>(stack[0]);
  }
};

void tree_sum_cuda(KernelContext& context) {
  const std::vector<int64_t>& merges = context.attributes().get_ints("merges");
  require_places(context, merges.size());
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const int64_t size = num_elements(context.output_shape(0));
    TreeSum<T> functor{
        context.input<T>(0), context.output<T>(0), size, static_cast<int64_t>(merges.size()), {}};
    std::copy(merges.begin(), merges.end(), functor.merges);
    launch(context, size, functor);
  });
}

template <typename Word>
struct StoreRow {
  const Word* row;
  Word* rows;
  int64_t size, count;
  const int64_t* micro_batch;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    if (*micro_batch < count) {
      rows[*micro_batch * size + i] = row[i];
    }
  }
};

void store_row_cuda(KernelContext& context) {
  dispatch_word(context.input_dtype(1), [&](auto tag) {
    using Word = decltype(tag);
    const int64_t size = num_elements(context.input_shape(1));
    launch(context,
           size,
           StoreRow<Word>{static_cast<const Word*>(context.raw_input(1)),
                          static_cast<Word*>(context.raw_output(0)),
                          size,
                          context.input_shape(0)[0],
                          context.input<int64_t>(2)});
  });
}

template <typename T>
struct FoldAverage {
  using C = ComputeOf<T>;
  const T *running, *rows;
  const double* grad_scale;  // null: the step is not one to skip
  T* out;
  int64_t size, count;
  C keep;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    C value = to_compute<C>(running[i]);
    const bool skip = grad_scale != nullptr && *grad_scale - *grad_scale != 0;
    for (int64_t r = 0; r < (skip ? 0 : count); ++r) {
      value = value * keep + to_compute<C>(rows[r * size + i]) * (C(1) - keep);
    }
    out[i] = to_storage<T>(value);
  }
};

void fold_average_cuda(KernelContext& context) {
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const int64_t size = num_elements(context.input_shape(0));
    launch(context,
           size,
           FoldAverage<T>{context.input<T>(0),
                          context.input<T>(1),
                          context.input<double>(2),
                          context.output<T>(0),
                          size,
                          context.input_shape(1)[0],
                          static_cast<ComputeOf<T>>(context.attributes().get_float("momentum"))});
  });
}

const RegisterCudaKernel kAccumulateTree{"AccumulateTree", accumulate_tree_cuda};
const RegisterCudaKernel kTreeSum{"TreeSum", tree_sum_cuda};
const RegisterCudaKernel kStoreRow{"StoreRow", store_row_cuda};
const RegisterCudaKernel kFoldAverage{"FoldAverage", fold_average_cuda};

}  // namespace

}  // namespace trainrt
