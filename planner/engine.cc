// Sources. megatron: Narayanan et al. 2021 and Korthikanti et al. 2022 (fp32 main gradients, fused
// scale-mask-softmax, bias-gelu and bias-dropout-add kernels, scatter/gather of stage transfers, no
// overlap of the gradient reduction, unfused attention; where ZeRO-3 is named, DeepSpeed of that
// time: weights fetched one by one, not beside compute, and again for recompute). megatron-core:
// its README of 2024-07 (data, tensor and pipeline communication overlapped, distributed optimizer,
// fused attention). deepspeed: Megatron-DeepSpeed as BigScience ran it (the pipeline engine splits
// a stage's output over the tensor ranks, sends, waits and gathers; fp16 gradients, reduced after
// the last backward; ZeRO-1; the device is waited for: BigScience set CUDA_LAUNCH_BLOCKING=1, and
// the engine reads the shape of every received part back to the host). fsdp: PyTorch FSDP (weights
// gathered one unit ahead, gradients reduce-scattered beside backward, flash attention; selective
// recompute as in torchtitan). trainrt: this program (the loss reads the logits as they are and
// writes their gradient over them).
#include "planner/engine.h"

#include "graph/base/error.h"

namespace trainrt {

namespace {

// Host time per profiled kernel of an eager PyTorch engine: in forward each stands for about four
// framework calls (views and transposes around it, module and autograd bookkeeping) of some 20 us;
// backward is walked by a thread of C++. (Sailor's profile of one layer of GPT-Neo, too small to
// busy the device: 1.5 ms forward of 16 kernels, 2.3 ms backward of 31.)
constexpr double kFrameworkCall = 20e-6;
constexpr double kInterpretedLaunch = 4 * kFrameworkCall;
constexpr double kBackwardLaunch = 30e-6;

// DeepSpeed's ZeRO-3 of 2021 fetched each weight matrix by a collective of its own.
constexpr int kMatricesPerLayer = 4;

// DeepSpeed's reduce and all-gather buckets hold 5e8 elements each.
constexpr double kBucketBytes = 2 * 5e8 * 2;

// NCCL: up to 24 channels, each with a sending and a receiving neighbour, and for each a buffer of
// 4 MiB (Simple), 4.7 MiB (LL128) and 0.5 MiB (LL). A rank is in the groups of the world, its data
// and tensor ranks, both neighbours in the pipeline, and the tied embedding.
constexpr double kCommunicatorBytes = 24 * 2 * 9.2 * 1048576;
constexpr int kNumCommunicators = 6;

std::vector<Engine> make_engines() {
  Engine trainrt;
  trainrt.fused_loss = true;
  trainrt.buckets = true;

  Engine megatron;
  megatron.name = "megatron";
  megatron.overlap_gradients = false;
  megatron.blocking_transfers = true;
  megatron.scattered_transfers = true;
  megatron.overlap_gather = false;
  megatron.gathers_per_block = kMatricesPerLayer;
  megatron.gather_call_seconds = kFrameworkCall;
  megatron.regathers = true;
  megatron.fused_accumulation = true;
  megatron.fused_attention = false;
  megatron.launch_seconds = kInterpretedLaunch;
  megatron.backward_launch_seconds = kBackwardLaunch;

  Engine core = megatron;
  core.name = "megatron-core";
  core.overlap_gradients = true;
  core.overlap_gather = true;
  core.gather_call_seconds = 0;
  core.overlap_tensor = true;
  core.blocking_transfers = false;
  core.fused_attention = true;

  Engine deepspeed;
  deepspeed.name = "deepspeed";
  deepspeed.gradient_bytes = 2;
  deepspeed.reduce_bytes = 2;
  deepspeed.overlap_gradients = false;
  deepspeed.blocking_transfers = true;
  deepspeed.scattered_transfers = true;
  deepspeed.fused_attention = false;
  deepspeed.launch_seconds = kInterpretedLaunch;
  deepspeed.backward_launch_seconds = kBackwardLaunch;
  deepspeed.waits_for_device = true;
  deepspeed.optimizer_bytes = 16;
  deepspeed.bucket_bytes = kBucketBytes;
  deepspeed.library_bytes = kNumCommunicators * kCommunicatorBytes;

  Engine fsdp;
  fsdp.name = "fsdp";
  fsdp.weight_bytes = 4;  // the shard is kept in fp32; the gathered unit is 16-bit
  fsdp.optimizer_bytes = 8;
  fsdp.selective = SelectiveRecompute::kEverySecondProduct;
  fsdp.reduce_bytes = 4;
  fsdp.launch_seconds = kInterpretedLaunch;
  fsdp.backward_launch_seconds = kBackwardLaunch;
  fsdp.fused_elementwise = false;
  return {trainrt, megatron, core, deepspeed, fsdp};
}

const std::vector<Engine>& engines() {
  static const std::vector<Engine> kEngines = make_engines();
  return kEngines;
}

}  // namespace

Engine find_engine(const std::string& name) {
  for (const Engine& engine : engines()) {
    if (engine.name == name) {
      return engine;
    }
  }
  TRAINRT_FAIL(
      kInvalidArgument, "unknown convention '", name, "'", did_you_mean(name, engine_names()));
}

std::vector<std::string> engine_names() {
  std::vector<std::string> names;
  for (const Engine& engine : engines()) {
    names.push_back(engine.name);
  }
  return names;
}

}  // namespace trainrt
