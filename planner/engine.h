// The documented habits of training engines: what a program of theirs holds, reduces and hides.
// Facts, no factors. `trainrt` is this program.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trainrt {

// What selective recompute runs again.
enum class SelectiveRecompute : uint8_t {
  kAttention,           // scores, softmax and context (Korthikanti et al. 2022)
  kEverySecondProduct,  // and all that is element-wise; fused attention is kept (torchtitan's "op")
  kEverySecondLayer,    // whole (torchtitan's "layer")
};

struct Engine {
  std::string name = "trainrt";
  double weight_bytes = 2;           // per parameter, as held beside the optimizer's
  double gather_bytes = 2;           // per parameter, as ZeRO gathers it
  double update_bytes = 2;           // per parameter, that the update moves of weights
  double gradient_bytes = 4;         // per parameter, as accumulated and held
  double reduce_bytes = 4;           // per parameter, as sent between data ranks
  double optimizer_bytes = 12;       // master weights and two moments
  bool overlap_gradients = true;     // reduction runs beside the last backward
  bool overlap_gather = true;        // ZeRO gathers weights beside compute
  int gathers_per_block = 1;         // ZeRO-3: collectives a block's weights take (one a parameter)
  double gather_call_seconds = 0;    // ZeRO-3: host time of a gather for each rank in it
  bool regathers = false;            // ZeRO-3: recompute gathers once more
  bool scatters_each = false;        // ZeRO-2 reduces the gradients of every micro-batch
  bool overlap_tensor = false;       // tensor collectives run beside matrix products
  bool blocking_transfers = false;   // stages wait for their sends
  bool scattered_transfers = false;  // each tensor rank sends its part of a stage's output
  bool fused_attention = true;       // no s x s matrix in memory
  bool fused_elementwise = true;     // bias + activation, bias + dropout + add are one kernel each
  bool fused_loss = false;           // on the logits as they are; no copy in fp32
  bool fused_accumulation = false;   // weight-gradient products add into the gradient buffer
  // Host time per kernel, forward and in backward (engines that are interpreted); 0: kernels' own.
  double launch_seconds = 0;
  double backward_launch_seconds = 0;
  SelectiveRecompute selective = SelectiveRecompute::kAttention;
  double bucket_bytes = 0;   // ZeRO 1 and 2: buffers that gradients and weights travel in
  bool buckets = false;      // they travel in messages of parallel/passes/buckets; else all at once
  double library_bytes = 0;  // what its communicators take beside the framework's memory
  // Memory is laid out by parallel/memory_plan: transients overlay what is not alive, and with one
  // micro-batch per step gradients are transients themselves.
  bool overlays_memory = false;
  bool waits_for_device = false;  // host time adds to the device's instead of running beside it
};

// "megatron", "megatron-core", "deepspeed", "fsdp", "trainrt"; throws kInvalidArgument with near
// names.
Engine find_engine(const std::string& name);
std::vector<std::string> engine_names();

}  // namespace trainrt
