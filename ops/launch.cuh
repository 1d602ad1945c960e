// The one way by which maths runs on a CUDA device: a functor for every index, or for every team of
// lanes that share a row.
//
//   launch(context, n, f)                  f(i) for i in [0, n)
//   launch_teams(context, n, length, f)    f(team, i) for i in [0, n): the lanes of a team work on
//                                          rows of about `length` elements together
//
// A functor is a struct with a call operator for host and device, passed by value: what it points
// to must be device memory. Without CUDA's compiler (the test double) the same functors run on the
// host, a team's lanes one after the other, with sums in the order that a device takes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>

#include "graph/base/cuda_check.h"
#include "graph/cuda_context.h"
#include "graph/kernel.h"
#include "ops/host_device.h"
#ifdef __CUDACC__
#include <cub/block/block_reduce.cuh>
#include <cub/warp/warp_reduce.cuh>
#else
#include <functional>
// Given by the test double: runs the `work` of so many threads or teams when the stream gets to it.
cudaError_t trainrt_double_launch(cudaStream_t stream, int64_t n, std::function<void()> work);
#endif

namespace trainrt {

// ---- elements: tensors are stored in T and computed in C -------------------------------------

template <typename C, typename T>
TRAINRT_HOST_DEVICE inline C to_compute(T value) {
  if constexpr (std::is_same_v<T, Float16>) {
#ifdef __CUDA_ARCH__
    return static_cast<C>(__half2float(__ushort_as_half(value.bits)));
#else
    return static_cast<C>(static_cast<float>(value));
#endif
  } else if constexpr (std::is_same_v<T, BFloat16>) {
#ifdef __CUDA_ARCH__
    return static_cast<C>(__bfloat162float(__ushort_as_bfloat16(value.bits)));
#else
    return static_cast<C>(static_cast<float>(value));
#endif
  } else {
    return static_cast<C>(value);
  }
}

template <typename T, typename C>
TRAINRT_HOST_DEVICE inline T to_storage(C value) {
  if constexpr (std::is_same_v<T, Float16>) {
#ifdef __CUDA_ARCH__
    T result;
    result.bits = __half_as_ushort(__float2half_rn(static_cast<float>(value)));
    return result;
#else
    return T(static_cast<float>(value));
#endif
  } else if constexpr (std::is_same_v<T, BFloat16>) {
#ifdef __CUDA_ARCH__
    T result;
    result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(static_cast<float>(value)));
    return result;
#else
    return T(static_cast<float>(value));
#endif
  } else if constexpr (std::is_same_v<T, bool>) {
    return value != C(0);
  } else {
    return static_cast<T>(value);
  }
}

// What elements of T are computed in: double for float64, float for the other floats.
template <typename T>
using ComputeOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls fn(T{}) with float, double, Float16 or BFloat16.
template <typename Fn>
void dispatch_stored(const Node& node, DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(float{});
    case DType::kFloat64:
      return fn(double{});
    case DType::kFloat16:
      return fn(Float16{});
    case DType::kBFloat16:
      return fn(BFloat16{});
    default:
      TRAINRT_FAIL(kUnsupported,
                   "node '",
                   node.name,
                   "' (",
                   node.op_type,
                   "): no CUDA kernel for ",
                   dtype_name(dtype));
  }
}

// Calls fn with an unsigned integer of the elements' size, for kernels that only move bits.
template <typename Fn>
void dispatch_word(DType dtype, Fn&& fn) {
  switch (dtype_bytes(dtype)) {
    case 1:
      return fn(uint8_t{});
    case 2:
      return fn(uint16_t{});
    case 4:
      return fn(uint32_t{});
    default:
      return fn(uint64_t{});
  }
}

TRAINRT_HOST_DEVICE inline void atomic_min(int32_t* to, int32_t value) {
#ifdef __CUDA_ARCH__
  atomicMin(to, value);
#else
  *to = value < *to ? value : *to;
#endif
}

// ---- launching -------------------------------------------------------------------------------

constexpr int kBlockThreads = 256;
constexpr int64_t kMaxBlocks = 2147483647;  // of a grid's x

#ifdef __CUDACC__

template <typename F>
__global__ void __launch_bounds__(kBlockThreads) for_each_index(int64_t n, const F functor) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (i < n) {
    functor(i);
  }
}

inline dim3 blocks_of(const KernelContext& context, int64_t n, int64_t per_block) {
  const int64_t blocks = (n + per_block - 1) / per_block;
  TRAINRT_CHECK(blocks <= kMaxBlocks, context.node().name, ": ", blocks, " thread blocks");
  return dim3(static_cast<unsigned>(blocks));
}

// Answers with the launch's own status: cudaGetLastError() may have one that another library left.
template <typename... Parameters, typename... Arguments>
void launch_grid(KernelContext& context,
                 dim3 blocks,
                 void (*kernel)(Parameters...),
                 const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(kBlockThreads);
  config.stream = cuda_context(context).cuda_stream();
  TRAINRT_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

template <typename F>
void launch(KernelContext& context, int64_t n, const F& functor) {
  if (n > 0) {
    launch_grid(context, blocks_of(context, n, kBlockThreads), for_each_index<F>, n, functor);
  }
}

// A kernel that was compiled at run time (CudaContext::compiled), for n threads, with `params` as
// its only parameter.
template <typename Params, typename HostForm>
void launch_compiled(
    KernelContext& context, cudaKernel_t kernel, int64_t n, Params params, const HostForm&) {
  if (n <= 0) {
    return;
  }
  void* arguments[] = {&params};
  TRAINRT_CUDA_CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel),
                                      blocks_of(context, n, kBlockThreads),
                                      dim3(kBlockThreads),
                                      arguments,
                                      0,
                                      cuda_context(context).cuda_stream()));
}

// kLanes threads, a warp or a block, that share a row.
template <int kLanes>
class Team {
 public:
  // fn(i) for i in [0, n), spread over the lanes.
  template <typename Fn>
  __device__ void for_each(int64_t n, Fn&& fn) const {
    for (int64_t i = lane(); i < n; i += kLanes) {
      fn(i);
    }
  }

  // store(i, load(i)) for i in [0, n): a lane loads kBatch elements before it stores the first, so
  // that many loads are under way though the compiler may not move them before a store.
  template <int kBatch, typename Load, typename Store>
  __device__ void for_each_loaded(int64_t n, Load&& load, Store&& store) const {
    for (int64_t first = lane(); first < n; first += kBatch * kLanes) {
      decltype(load(first)) loaded[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b * kLanes < n) {
          loaded[b] = load(first + b * kLanes);
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (first + b * kLanes < n) {
          store(first + b * kLanes, loaded[b]);
        }
      }
    }
  }

  // What one lane makes, for all lanes: for what takes long and is the same for each.
  template <typename Fn>
  __device__ auto once(Fn&& make) const {
    using A = decltype(make());
    static_assert(std::is_trivially_copyable_v<A> && kLanes == kBlockThreads);
    __shared__ alignas(A) unsigned char room[sizeof(A)];
    if (lane() == 0) {
      new (room) A(make());
    }
    synchronize();
    const A made = *reinterpret_cast<const A*>(room);
    synchronize();  // before the next call reuses the room
    return made;
  }

  // What for_each wrote is seen by all lanes afterwards.
  __device__ void synchronize() const {
    if constexpr (kLanes == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // combine over fn(i) for i in [0, n), starting from `identity`; every lane gets the result. The
  // order depends on n alone.
  template <typename A, typename Fn, typename Combine>
  __device__ A reduce(int64_t n, A identity, Fn&& fn, Combine&& combine) const {
    A value = identity;
    for (int64_t i = lane(); i < n; i += kLanes) {
      value = combine(value, fn(i));
    }
    constexpr int kTeams = kBlockThreads / kLanes;
    __shared__ A results[kTeams];
    const int team = static_cast<int>(threadIdx.x) / kLanes;
    if constexpr (kLanes == 32) {
      using Reduce = cub::WarpReduce<A>;
      __shared__ typename Reduce::TempStorage storage[kTeams];
      value = Reduce(storage[team]).Reduce(value, combine);
    } else {
      using Reduce = cub::BlockReduce<A, kLanes>;
      __shared__ typename Reduce::TempStorage storage;
      value = Reduce(storage).Reduce(value, combine);
    }
    if (lane() == 0) {
      results[team] = value;
    }
    synchronize();
    value = results[team];
    synchronize();  // before the next reduction reuses the room
    return value;
  }

  __device__ bool leads() const {
    return lane() == 0;
  }

 private:
  __device__ int lane() const {
    return static_cast<int>(threadIdx.x) % kLanes;
  }
};

template <int kLanes, typename F>
__global__ void __launch_bounds__(kBlockThreads) for_each_team(int64_t n, const F functor) {
  constexpr int kTeams = kBlockThreads / kLanes;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kTeams + threadIdx.x / kLanes;
  if (i < n) {  // a whole team leaves or none of it
    functor(Team<kLanes>(), i);
  }
}

template <int kLanes, typename F>
void launch_teams_of(KernelContext& context, int64_t n, const F& functor) {
  if (n > 0) {
    const dim3 blocks = blocks_of(context, n, kBlockThreads / kLanes);
    launch_grid(context, blocks, for_each_team<kLanes, F>, n, functor);
  }
}

#else  // the test double

template <typename F>
void launch(KernelContext& context, int64_t n, const F& functor) {
  if (n <= 0) {
    return;
  }
  TRAINRT_CUDA_CHECK(trainrt_double_launch(cuda_context(context).cuda_stream(), n, [=] {
    for (int64_t i = n; i-- > 0;) {  // backwards: nothing may rely on an order
      functor(i);
    }
  }));
}

// The host form is what the kernel does, thread by thread.
template <typename Params, typename HostForm>
void launch_compiled(
    KernelContext& context, cudaKernel_t kernel, int64_t n, const Params&, const HostForm& host) {
  TRAINRT_CHECK(kernel != nullptr);
  launch(context, n, host);
}

template <int kLanes>
class Team {
 public:
  template <typename Fn>
  void for_each(int64_t n, Fn&& fn) const {
    for (int64_t i = n; i-- > 0;) {
      fn(i);
    }
  }
  template <int kBatch, typename Load, typename Store>
  void for_each_loaded(int64_t n, Load&& load, Store&& store) const {
    for_each(n, [&](int64_t i) { store(i, load(i)); });
  }
  template <typename Fn>
  auto once(Fn&& make) const {
    return make();
  }
  void synchronize() const {}
  template <typename A, typename Fn, typename Combine>
  A reduce(int64_t n, A identity, Fn&& fn, Combine&& combine) const {
    A lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = identity;
      for (int64_t i = lane; i < n; i += kLanes) {
        lanes[lane] = combine(lanes[lane], fn(i));
      }
    }
    // A tree over the lanes of a warp, then the warps in order.
    for (int first = 0; first < kLanes; first += 32) {
      for (int width = 1; width < 32; width *= 2) {
        for (int lane = 0; lane + width < 32; lane += 2 * width) {
          lanes[first + lane] = combine(lanes[first + lane], lanes[first + lane + width]);
        }
      }
      if (first > 0) {
        lanes[0] = combine(lanes[0], lanes[first]);
      }
    }
    return lanes[0];
  }
  bool leads() const { return true; }
};

template <int kLanes, typename F>
void launch_teams_of(KernelContext& context, int64_t n, const F& functor) {
  if (n <= 0) {
    return;
  }
  TRAINRT_CUDA_CHECK(trainrt_double_launch(cuda_context(context).cuda_stream(), n, [=] {
    for (int64_t i = n; i-- > 0;) {
      functor(Team<kLanes>(), i);
    }
  }));
}

#endif

template <typename F>
void launch_teams(KernelContext& context, int64_t n, int64_t length, const F& functor) {
  constexpr int64_t kWarpLength = 512;  // shorter rows leave most of a block idle
  if (length <= kWarpLength) {
    launch_teams_of<32>(context, n, functor);
  } else {
    launch_teams_of<kBlockThreads>(context, n, functor);
  }
}

// Sum over fn(i), i in [0, n), of a team.
template <typename A, typename T, typename Fn>
TRAINRT_HOST_DEVICE inline A team_sum(const T& team, int64_t n, Fn&& fn) {
  return team.template reduce<A>(n, A(0), fn, [](const A& a, const A& b) { return a + b; });
}

}  // namespace trainrt
