// CUDA kernels of the optimizers, by the rules that the CPU runs too, of Accumulate, and of the
// gradient norm. The step's scalars (learning rate, scale, step) lie in device memory: each thread
// reads them once for the many elements that it updates.
#include <cmath>
#include <limits>

#include "ops/elementwise.cuh"
#include "ops/launch.cuh"
#include "ops/optimizer_rules.h"

namespace trainrt {

namespace {

// A team's elements. It makes its rule (which raises numbers to powers in double) once for all of
// them; more to a team would leave a GPU half idle at the tensors of small models.
constexpr int64_t kChunk = 1 << 11;
constexpr int kBatch = 4;  // of which a lane has loaded so many when it stores the first

struct Scalar {
  const void* data = nullptr;
  DType dtype = DType::kFloat64;
  TRAINRT_HOST_DEVICE double get() const {
    return dtype == DType::kFloat64   ? *static_cast<const double*>(data)
           : dtype == DType::kFloat32 ? static_cast<double>(*static_cast<const float*>(data))
                                      : static_cast<double>(*static_cast<const int64_t*>(data));
  }
};

Scalar scalar_of(const KernelContext& context, int input) {
  const DType dtype = context.input_dtype(input);
  TRAINRT_REQUIRE(dtype == DType::kFloat64 || dtype == DType::kFloat32 || dtype == DType::kInt64,
                  kUnsupported,
                  context.node().name,
                  ": scalar input ",
                  input,
                  " is ",
                  dtype_name(dtype),
                  ", wanted float32, float64 or int64");
  return {context.raw_input(input), dtype};
}

TRAINRT_HOST_DEVICE inline bool finite(double x) {
  return x - x == 0;
}

// store(i, load(i)) for the elements of a chunk.
template <typename Lanes, typename Load, typename Store>
TRAINRT_HOST_DEVICE void for_chunk(
    const Lanes& team, int64_t chunk, int64_t n, const Load& load, const Store& store) {
  const int64_t first = chunk * kChunk, rest = n - first;
  team.template for_each_loaded<kBatch>(
      rest < kChunk ? rest : kChunk,
      [&](int64_t i) { return load(first + i); },
      [&](int64_t i, const auto& element) { store(first + i, element); });
}

// What the optimizers read of an element.
template <typename T>
struct Element {
  T param, grad, first, second;
};

template <typename F>
void launch_chunks(KernelContext& context, int64_t n, const F& functor) {
  launch_teams_of<kBlockThreads>(context, (n + kChunk - 1) / kChunk, functor);
}

template <template <typename> typename Rule, typename T>
struct Update {
  optimizer::Constants constants;
  Scalar learning_rate, grad_scale, step;
  const T* grad;
  T *param, *first, *second;
  int64_t n;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t chunk) const {
    const double scale = grad_scale.get();
    if (!finite(scale)) {
      return;
    }
    const Update& self = *this;
    const Rule<T> rule = team.once([&self, scale] {
      return Rule<T>(self.constants, {self.learning_rate.get(), scale, self.step.get()});
    });
    for_chunk(
        team,
        chunk,
        n,
        [&](int64_t i) {
          return Element<T>{self.param[i],
                            self.grad[i],
                            Rule<T>::kStates > 0 ? self.first[i] : T(0),
                            Rule<T>::kStates > 1 ? self.second[i] : T(0)};
        },
        [&](int64_t i, Element<T> e) {
          if constexpr (Rule<T>::kStates == 0) {
            rule(e.param, e.grad);
          } else if constexpr (Rule<T>::kStates == 1) {
            rule(e.param, e.grad, e.first);
          } else {
            rule(e.param, e.grad, e.first, e.second);
            self.second[i] = e.second;
          }
          if constexpr (Rule<T>::kStates > 0) {
            self.first[i] = e.first;
          }
          self.param[i] = e.param;
        });
  }
};

template <template <typename> typename Rule>
void optimizer_cuda(KernelContext& context) {
  dispatch_floating(context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    constexpr int kStates = Rule<T>::kStates;
    const int64_t n = num_elements(context.input_shape(0));
    launch_chunks(context,
                  n,
                  Update<Rule, T>{optimizer::Constants(context.attributes()),
                                  scalar_of(context, kStates + 2),
                                  scalar_of(context, kStates + 3),
                                  scalar_of(context, kStates + 4),
                                  context.input<T>(1),
                                  context.output<T>(0),
                                  kStates > 0 ? context.output<T>(1) : nullptr,
                                  kStates > 1 ? context.output<T>(2) : nullptr,
                                  n});
  });
}

template <typename T>
struct Direction {
  optimizer::Constants constants;
  Scalar grad_scale, step;
  const T *param, *grad;
  T *direction, *first, *second;
  int64_t n;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t chunk) const {
    const double scale = grad_scale.get();
    const Direction& self = *this;
    const auto rule = team.once([&self, scale] {
      return optimizer::LambDirection<T>(self.constants, {0, scale, self.step.get()});
    });
    const bool skip = !finite(scale);
    for_chunk(
        team,
        chunk,
        n,
        [&](int64_t i) {
          return Element<T>{self.param[i], self.grad[i], self.first[i], self.second[i]};
        },
        [&](int64_t i, Element<T> e) {
          if (skip) {
            self.direction[i] = T(0);
            return;
          }
          self.direction[i] = rule(e.param, e.grad, e.first, e.second);
          self.first[i] = e.first;
          self.second[i] = e.second;
        });
  }
};

void lamb_direction_cuda(KernelContext& context) {
  dispatch_floating(context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const int64_t n = num_elements(context.input_shape(0));
    launch_chunks(context,
                  n,
                  Direction<T>{optimizer::Constants(context.attributes()),
                               scalar_of(context, 4),
                               scalar_of(context, 5),
                               context.input<T>(0),
                               context.input<T>(1),
                               context.output<T>(0),
                               context.output<T>(1),
                               context.output<T>(2),
                               n});
  });
}

template <typename T>
struct ApplyDirection {
  const double *param_squares, *direction_squares;
  Scalar learning_rate, grad_scale;
  const T* direction;
  T* param;
  int64_t n;
  struct Loaded {
    T param, direction;
  };
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t chunk) const {
    if (!finite(grad_scale.get())) {
      return;
    }
    const double p = std::sqrt(*param_squares), d = std::sqrt(*direction_squares);
    const T factor = static_cast<T>(learning_rate.get() * (p > 0 && d > 0 ? p / d : 1));
    const ApplyDirection& self = *this;
    for_chunk(
        team,
        chunk,
        n,
        [&](int64_t i) {
          return Loaded{self.param[i], self.direction[i]};
        },
        [&](int64_t i, const Loaded& e) { self.param[i] = e.param - factor * e.direction; });
  }
};

void lamb_apply_cuda(KernelContext& context) {
  dispatch_floating(context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    const int64_t n = num_elements(context.input_shape(0));
    launch_chunks(context,
                  n,
                  ApplyDirection<T>{context.input<double>(2),
                                    context.input<double>(3),
                                    scalar_of(context, 4),
                                    scalar_of(context, 5),
                                    context.input<T>(1),
                                    context.output<T>(0),
                                    n});
  });
}

template <template <typename> typename Rule, typename T>
struct OnnxUpdate {
  optimizer::OnnxConstants constants;
  Scalar rate, count;
  const T *x, *g, *first, *second;
  T *x_new, *first_new, *second_new;
  int64_t n;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t chunk) const {
    const OnnxUpdate& self = *this;
    const Rule<T> rule =
        team.once([&self] { return Rule<T>(self.constants, self.rate.get(), self.count.get()); });
    for_chunk(
        team,
        chunk,
        n,
        [&](int64_t i) {
          return Element<T>{
              self.x[i], self.g[i], self.first[i], Rule<T>::kStates > 1 ? self.second[i] : T(0)};
        },
        [&](int64_t i, Element<T> e) {
          if constexpr (Rule<T>::kStates == 1) {
            self.x_new[i] = rule(e.param, e.grad, e.first);
          } else {
            self.x_new[i] = rule(e.param, e.grad, e.first, e.second);
            if (self.second_new != nullptr) {
              self.second_new[i] = e.second;
            }
          }
          if (self.first_new != nullptr) {
            self.first_new[i] = e.first;
          }
        });
  }
};

template <template <typename> typename Rule>
void onnx_optimizer_cuda(KernelContext& context) {
  dispatch_floating(context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    constexpr int kStates = Rule<T>::kStates;
    const int64_t n = num_elements(context.input_shape(0));
    launch_chunks(context,
                  n,
                  OnnxUpdate<Rule, T>{optimizer::OnnxConstants(context.attributes()),
                                      scalar_of(context, kStates + 2),
                                      scalar_of(context, kStates + 3),
                                      context.input<T>(0),
                                      context.input<T>(1),
                                      context.input<T>(2),
                                      kStates > 1 ? context.input<T>(3) : nullptr,
                                      context.output<T>(0),
                                      context.output<T>(1),
                                      kStates > 1 ? context.output<T>(2) : nullptr,
                                      n});
  });
}

// ---- Accumulate --------------------------------------------------------------------------------

template <typename T>
struct AddTerm {
  const T *accumulator, *term;
  T* out;
  bool first;
  TRAINRT_HOST_DEVICE void operator()(int64_t i) const {
    using C = ComputeOf<T>;
    out[i] =
        first ? term[i] : to_storage<T>(to_compute<C>(accumulator[i]) + to_compute<C>(term[i]));
  }
};

void accumulate_cuda(KernelContext& context) {
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch(context,
           num_elements(context.input_shape(0)),
           AddTerm<T>{context.input<T>(0),
                      context.input<T>(1),
                      context.output<T>(0),
                      context.step().first_micro_batch});
  });
}

// ---- the gradient norm -------------------------------------------------------------------------

template <typename T>
struct SquareSumOfRow {
  const T* x;
  double* sums;
  int64_t width;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t row) const {
    const T* from = x + row * width;
    const double sum = team_sum<double>(team, width, [from](int64_t i) {
      const double value = to_compute<double>(from[i]);
      return value * value;
    });
    if (team.leads()) {
      sums[row] = sum;
    }
  }
};

void row_square_sums_cuda(KernelContext& context) {
  const Shape& shape = context.input_shape(0);
  const int64_t rows = shape.empty() ? 1 : shape[0];
  const int64_t width = rows == 0 ? 0 : num_elements(shape) / rows;
  dispatch_stored(context.node(), context.input_dtype(0), [&](auto tag) {
    using T = decltype(tag);
    launch_teams(context,
                 rows,
                 width,
                 SquareSumOfRow<T>{context.input<T>(0), context.output<double>(0), width});
  });
}

// By one team: the order depends on n alone.
struct SumOfVector {
  const double* x;
  double* out;
  int64_t n;
  template <typename Lanes>
  TRAINRT_HOST_DEVICE void operator()(const Lanes& team, int64_t) const {
    const double* from = x;
    const double sum = team_sum<double>(team, n, [from](int64_t i) { return from[i]; });
    if (team.leads()) {
      *out = sum;
    }
  }
};

void ordered_sum_cuda(KernelContext& context) {
  const int64_t n = num_elements(context.input_shape(0));
  launch_teams(context, 1, n, SumOfVector{context.input<double>(0), context.output<double>(0), n});
}

// out = sqrt(sum) * |scale| of a group of scalars that lie anywhere. A kernel's arguments hold so
// many addresses; more scalars take more launches, each of which adds its own to the sum so far.
constexpr int kGroup = 64;

struct AddScalars {
  const double* scalars[kGroup];
  int count;
  bool first, last;
  Scalar grad_scale;
  double* out;
  TRAINRT_HOST_DEVICE void operator()(int64_t) const {
    double sum = first ? 0 : *out;
    for (int i = 0; i < count; ++i) {
      sum += *scalars[i];
    }
    *out = last ? std::sqrt(sum) * std::fabs(grad_scale.get()) : sum;
  }
};

void global_norm_cuda(KernelContext& context) {
  int next = 1;
  do {
    AddScalars add{{}, 0, next == 1, false, scalar_of(context, 0), context.output<double>(0)};
    while (next < context.num_inputs() && add.count < kGroup) {
      add.scalars[add.count++] = context.input<double>(next++);
    }
    add.last = next == context.num_inputs();
    launch(context, 1, add);
  } while (next < context.num_inputs());
}

struct ClipScale {
  const double* norm;
  Scalar grad_scale;
  double clip;
  double* out;
  TRAINRT_HOST_DEVICE void operator()(int64_t) const {
    const double ratio = clip / (*norm + 1e-6);
    *out = !finite(*norm)          ? std::numeric_limits<double>::quiet_NaN()
           : clip > 0 && ratio < 1 ? grad_scale.get() * ratio
                                   : grad_scale.get();
  }
};

void clip_scale_cuda(KernelContext& context) {
  launch(context,
         1,
         ClipScale{context.input<double>(0),
                   scalar_of(context, 1),
                   context.attributes().get_float("clip_norm", 0),
                   context.output<double>(0)});
}

const RegisterCudaKernel kSgd{"Sgd", optimizer_cuda<optimizer::Sgd>};
const RegisterCudaKernel kMomentum{"Momentum", optimizer_cuda<optimizer::Momentum>};
const RegisterCudaKernel kAdagrad{"Adagrad", optimizer_cuda<optimizer::Adagrad>};
const RegisterCudaKernel kAdam{"Adam", optimizer_cuda<optimizer::Adam>};
const RegisterCudaKernel kAdamW{"AdamW", optimizer_cuda<optimizer::AdamW>};
const RegisterCudaKernel kLambDirection{"LambDirection", lamb_direction_cuda};
const RegisterCudaKernel kLambApply{"LambApply", lamb_apply_cuda};
const RegisterCudaKernel kOnnxAdagrad{"OnnxAdagrad", onnx_optimizer_cuda<optimizer::OnnxAdagrad>};
const RegisterCudaKernel kOnnxAdam{"OnnxAdam", onnx_optimizer_cuda<optimizer::OnnxAdam>};
const RegisterCudaKernel kOnnxMomentum{"OnnxMomentum",
                                       onnx_optimizer_cuda<optimizer::OnnxMomentum>};
const RegisterCudaKernel kAccumulate{"Accumulate", accumulate_cuda};
const RegisterCudaKernel kRowSquareSums{"RowSquareSums", row_square_sums_cuda};
const RegisterCudaKernel kOrderedSum{"OrderedSum", ordered_sum_cuda};
const RegisterCudaKernel kGlobalNorm{"GlobalNorm", global_norm_cuda};
const RegisterCudaKernel kClipScale{"ClipScale", clip_scale_cuda};

}  // namespace

}  // namespace trainrt
