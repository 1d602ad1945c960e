// Reductions on a CUDA device, from the reducers of ops/reduce_rules.h.
//
// A team of lanes reduces one output. Where the innermost dim is kept, neighbouring outputs lie
// side by side and one thread each reads better: a column of threads walks down the rows. Few
// outputs with much to reduce are cut into segments first, whose results lie in the workspace and
// are merged by a team. All cuts follow from the shape, so the bits do, too.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "ops/broadcast.h"
#include "ops/elementwise.cuh"
#include "ops/launch.cuh"
#include "ops/reduce_segments.h"

namespace trainrt {

// The dims of a tensor, merged, split into kept and reduced ones.
struct ReductionWalk {
  int num_kept = 0, num_reduced = 0;
  int64_t kept_dims[kMaxDims], kept_strides[kMaxDims];
  int64_t reduced_dims[kMaxDims], reduced_strides[kMaxDims];
  int64_t outputs = 1, count = 1;

  TRAINRT_HOST_DEVICE static int64_t offset(int ndim,
                                            const int64_t* dims,
                                            const int64_t* strides,
                                            int64_t i) {
    int64_t at = 0;
    for (int d = ndim - 1; d > 0; --d) {
      at += i % dims[d] * strides[d];
      i /= dims[d];
    }
    return ndim > 0 ? at + i * strides[0] : 0;
  }
  TRAINRT_HOST_DEVICE int64_t kept(int64_t output) const {
    return offset(num_kept, kept_dims, kept_strides, output);
  }
  TRAINRT_HOST_DEVICE int64_t reduced(int64_t i) const {
    return offset(num_reduced, reduced_dims, reduced_strides, i);
  }
};

inline ReductionWalk reduction_walk(const Shape& shape, const std::vector<int64_t>& axes) {
  const int ndim = static_cast<int>(shape.size());
  std::vector<bool> reduced(shape.size(), false);
  for (const int64_t axis : axes) {
    reduced[static_cast<size_t>(normalize_axis(axis, ndim))] = true;
  }
  // merge_loops keeps dims apart whose second stride does not continue: 0 marks the reduced ones.
  Shape marks(shape.size());
  int64_t running = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    marks[d] = reduced[d] ? 0 : running;
    running *= reduced[d] ? 1 : shape[d];
  }
  const std::array<Shape, 2> strides = {row_major_strides(shape), marks};
  const BroadcastLoops loops = merge_loops(shape, strides);
  ReductionWalk walk{};
  walk.outputs = walk.count = 1;
  for (size_t d = 0; d < static_cast<size_t>(loops.ndim); ++d) {
    if (loops.strides[1][d] == 0) {
      walk.reduced_dims[walk.num_reduced] = loops.dims[d];
      walk.reduced_strides[walk.num_reduced++] = loops.strides[0][d];
      walk.count *= loops.dims[d];
    } else {
      walk.kept_dims[walk.num_kept] = loops.dims[d];
      walk.kept_strides[walk.num_kept++] = loops.strides[0][d];
      walk.outputs *= loops.dims[d];
    }
  }
  return walk;
}

// The elements of an output, however they lie and are stored.
template <typename S>
struct WalkedElements {
  static constexpr int kAhead = 1;  // loads that a thread has under way
  ReductionWalk walk;
  const void* in;
  DType dtype;
  TRAINRT_HOST_DEVICE typename S::C load(int64_t base, int64_t i) const {
    return S::load(in, dtype, base + walk.reduced(i));
  }
};

// Those that are one step apart, of a type that is known: nothing to branch at or to divide by
// keeps loads from being under way together.
template <typename T>
struct StridedElements {
  static constexpr int kAhead = 8;
  ReductionWalk walk;
  const T* in;
  int64_t stride;
  TRAINRT_HOST_DEVICE ComputeOf<T> load(int64_t base, int64_t i) const {
    return to_compute<ComputeOf<T>>(in[base + i * stride]);
  }
};

// What becomes of the elements [first, end) of an output: a partial result, where there are more.
template <typename R, typename S, typename A>
struct ReductionResult {
  void* out;
  A* partial;  // [outputs][segments]
  DType dtype;
  int64_t segments, segment_size;
  double count;
  TRAINRT_HOST_DEVICE void store(int64_t output, int64_t segment, const A& total) const {
    if (segments > 1) {
      partial[output * segments + segment] = total;
    } else {
      finish(output, total);
    }
  }
  TRAINRT_HOST_DEVICE void finish(int64_t output, const A& total) const {
    S::store(out, dtype, output, static_cast<typename S::C>(R::finish(total, count)));
  }
};

template <typename R, typename S, typename A, typename Elements>
struct ReduceTeam {
  Elements elements;
  ReductionResult<R, S, A> result;
  template <typename T>
  TRAINRT_HOST_DEVICE void operator()(const T& team, int64_t index) const {
    const int64_t output = index / result.segments, segment = index % result.segments;
    const int64_t first = segment * result.segment_size;
    const int64_t rest = elements.walk.count - first;
    const int64_t base = elements.walk.kept(output);
    const Elements& from = elements;
    const A total = team.reduce(
        rest < result.segment_size ? rest : result.segment_size,
        R::template init<A>(),
        [&](int64_t i) { return R::step(R::template init<A>(), from.load(base, first + i)); },
        [](const A& a, const A& b) { return R::merge(a, b); });
    if (team.leads()) {
      result.store(output, segment, total);
    }
  }
};

template <typename R, typename S, typename A, typename Elements>
struct ReduceColumn {
  Elements elements;
  ReductionResult<R, S, A> result;
  TRAINRT_HOST_DEVICE void operator()(int64_t index) const {
    const int64_t segment = index / elements.walk.outputs, output = index % elements.walk.outputs;
    const int64_t first = segment * result.segment_size, count = elements.walk.count;
    const int64_t end = first + result.segment_size < count ? first + result.segment_size : count;
    const int64_t base = elements.walk.kept(output);
    A total = R::template init<A>();
#pragma unroll Elements::kAhead
    for (int64_t i = first; i < end; ++i) {
      total = R::step(total, elements.load(base, i));
    }
    result.store(output, segment, total);
  }
};

template <typename R, typename S, typename A>
struct MergeSegments {
  ReductionResult<R, S, A> result;
  template <typename T>
  TRAINRT_HOST_DEVICE void operator()(const T& team, int64_t output) const {
    const A* partial = result.partial + output * result.segments;
    const A total = team.reduce(
        result.segments,
        R::template init<A>(),
        [partial](int64_t s) { return partial[s]; },
        [](const A& a, const A& b) { return R::merge(a, b); });
    if (team.leads()) {
      result.finish(output, total);
    }
  }
};

// Reduces by R. S loads and stores the elements (ops/elementwise.cuh), A adds them up; `count` is
// what a mean divides by. Partial results lie in the workspace, which bounds their number.
template <typename R, typename S, typename A>
void launch_reduction(KernelContext& context,
                      const ReductionWalk& walk,
                      DType dtype,
                      const void* in,
                      void* out,
                      std::span<std::byte> workspace,
                      double count) {
  const bool columns = walk.num_kept > 0 && walk.kept_strides[walk.num_kept - 1] == 1 &&
                       walk.kept_dims[walk.num_kept - 1] >= 32;
  const int64_t room =
      static_cast<int64_t>(workspace.size() / sizeof(A)) / std::max<int64_t>(1, walk.outputs);
  const int64_t wanted = reduce::device_segments(walk.outputs, walk.count, columns);
  const int64_t segments = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, room));
  const ReductionResult<R, S, A> result{out,
                                        reinterpret_cast<A*>(workspace.data()),
                                        dtype,
                                        segments,
                                        (walk.count + segments - 1) / segments,
                                        count};
  const auto run = [&](const auto& elements) {
    using Elements = std::decay_t<decltype(elements)>;
    if (columns) {
      launch(context, walk.outputs * segments, ReduceColumn<R, S, A, Elements>{elements, result});
    } else {
      launch_teams(context,
                   walk.outputs * segments,
                   result.segment_size,
                   ReduceTeam<R, S, A, Elements>{elements, result});
    }
  };
  constexpr bool kInFloat = std::is_same_v<typename S::C, float>;
  if (kInFloat && walk.num_reduced == 1) {
    dispatch_stored(context.node(), dtype, [&](auto tag) {
      using T = decltype(tag);
      if constexpr (kInFloat && !std::is_same_v<T, double>) {
        run(StridedElements<T>{walk, static_cast<const T*>(in), walk.reduced_strides[0]});
      }
    });
  } else {
    run(WalkedElements<S>{walk, in, dtype});
  }
  if (segments > 1) {
    launch_teams_of<32>(context, walk.outputs, MergeSegments<R, S, A>{result});
  }
}

}  // namespace trainrt
