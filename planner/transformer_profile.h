// The profile of a Transformer as another engine runs it: kernels and saved tensors by that
// engine's documentation. Our own programs are profiled from their graph (planner/graph_profile);
// this is for judging predictions against measurements of other engines.
#pragma once

#include "planner/engine.h"
#include "planner/model_profile.h"

namespace trainrt {

struct TransformerShape {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;
  int64_t seq = 0;
  bool gated = false;  // SwiGLU: three products in the MLP
  bool bias = true;
  bool dropout = true;
  bool tied_head = true;
  bool causal = true;
};

// 3 x (products of the forward pass, attention in full).
double transformer_model_flops(const TransformerShape& shape);
double transformer_parameters(const TransformerShape& shape);

// Blocks: embedding, `layers` layers, head. `element_bytes`: of an activation.
ModelProfile transformer_profile(const TransformerShape& shape,
                                 const Engine& engine,
                                 int64_t micro_batch,
                                 int tensor_parallel,
                                 bool sequence_parallel,
                                 double element_bytes = 2);

}  // namespace trainrt
