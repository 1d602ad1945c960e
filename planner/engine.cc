// Sources. megatron: Narayanan et al. 2021 and Korthikanti et al. 2022 (fp32 main gradients, fused
// scale-mask-softmax, bias-gelu and bias-dropout-add kernels, scatter/gather of stage transfers, no
// overlap of the gradient reduction, unfused attention; where ZeRO-3 is named, DeepSpeed of that
// time: weights fetched one by one, not beside compute, and again for recompute). megatron-core:
// its README of 2024-07 (data, tensor and pipeline communication overlapped, distributed optimizer,
// fused attention). deepspeed: BigScience's Megatron-DeepSpeed (pipeline engine sends whole
// activations and waits, fp16 gradients, reduction after the last backward, ZeRO-1). fsdp: PyTorch
// FSDP (weights gathered one unit ahead, gradients reduce-scattered beside backward, flash
// attention).
#include "planner/engine.h"

#include "graph/base/error.h"

namespace trainrt {

namespace {

// Host time per profiled kernel of an eager PyTorch engine: each stands for about three framework
// calls (views and transposes around it, module and autograd bookkeeping) of some 20 us.
constexpr double kInterpretedLaunch = 60e-6;

// DeepSpeed's ZeRO-3 of 2021 fetched each weight matrix by a collective of its own.
constexpr int kMatricesPerLayer = 4;

std::vector<Engine> make_engines() {
  Engine trainrt;

  Engine megatron;
  megatron.name = "megatron";
  megatron.overlap_gradients = false;
  megatron.blocking_transfers = true;
  megatron.scattered_transfers = true;
  megatron.overlap_gather = false;
  megatron.gathers_per_block = kMatricesPerLayer;
  megatron.regathers = true;
  megatron.fused_accumulation = true;
  megatron.fused_attention = false;
  megatron.launch_seconds = kInterpretedLaunch;

  Engine core = megatron;
  core.name = "megatron-core";
  core.overlap_gradients = true;
  core.overlap_gather = true;
  core.overlap_tensor = true;
  core.blocking_transfers = false;
  core.fused_attention = true;

  Engine deepspeed;
  deepspeed.name = "deepspeed";
  deepspeed.gradient_bytes = 2;
  deepspeed.reduce_bytes = 2;
  deepspeed.overlap_gradients = false;
  deepspeed.blocking_transfers = true;
  deepspeed.fused_attention = false;
  deepspeed.launch_seconds = kInterpretedLaunch;

  Engine fsdp;
  fsdp.name = "fsdp";
  fsdp.weight_bytes = 4;  // the shard is kept in fp32; the gathered unit is 16-bit
  fsdp.optimizer_bytes = 8;
  fsdp.reduce_bytes = 4;
  fsdp.launch_seconds = kInterpretedLaunch;
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
