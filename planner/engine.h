// The documented habits of training engines: what a program of theirs holds, reduces and hides.
// Facts, no factors. `trainrt` is this program.
#pragma once

#include <string>
#include <vector>

namespace trainrt {

struct Engine {
  std::string name = "trainrt";
  double weight_bytes = 2;           // per parameter, as computed with
  double gradient_bytes = 4;         // per parameter, as accumulated and held
  double reduce_bytes = 4;           // per parameter, as sent between data ranks
  double optimizer_bytes = 12;       // master weights and two moments
  bool overlap_gradients = true;     // reduction runs beside the last backward
  bool overlap_gather = true;        // ZeRO gathers weights beside compute
  int gathers_per_block = 1;         // ZeRO-3: collectives a block's weights take (one a parameter)
  bool regathers = false;            // ZeRO-3: recompute gathers once more
  bool overlap_tensor = false;       // tensor collectives run beside matrix products
  bool blocking_transfers = false;   // stages wait for their sends
  bool scattered_transfers = false;  // each tensor rank sends its part of a stage's output
  bool fused_attention = true;       // no s x s matrix in memory
  bool fused_elementwise = true;     // bias + activation, bias + dropout + add are one kernel each
  bool fused_accumulation = false;   // weight-gradient products add into the gradient buffer
  double launch_seconds = 0;  // host time per kernel (interpreted engines); 0: kernels' own floor
};

// "megatron", "megatron-core", "deepspeed", "fsdp", "trainrt"; throws kInvalidArgument with near
// names.
Engine find_engine(const std::string& name);
std::vector<std::string> engine_names();

}  // namespace trainrt
