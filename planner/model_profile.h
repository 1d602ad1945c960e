// What the search knows of a model at one micro-batch size and tensor degree: a chain of blocks
// (the places where a pipeline may be cut), most of which are copies of few classes. Kernels, bytes
// and communication are those of one tensor rank; nothing here depends on a device.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "graph/cost.h"
#include "parallel/plan.h"
#include "parallel/topology.h"
#include "planner/collective_cost.h"

namespace trainrt {

// A collective over the tensor group.
struct TensorCollective {
  Collective kind = Collective::kAllReduce;
  double bytes = 0;
};

// One kernel. Fused attention keeps its products out of memory, and runs below a product's rate.
struct KernelProfile {
  Cost cost;
  bool fused_attention = false;
  // By which devices that have been measured know it (planner/kernel_sample.h); "": they do not.
  std::string name = {};
  KernelSample size = {};
};

// Kernels and collectives that run one after the other.
struct PhaseProfile {
  std::vector<KernelProfile> kernels;
  std::vector<TensorCollective> collectives;
  // Of each sum that BatchNorm, where it is synchronised, adds over the data ranks.
  std::vector<double> statistics_bytes;

  void kernel(Cost cost, bool fused_attention = false) {
    kernels.push_back({std::move(cost), fused_attention, {}, {}});
  }
  void stream(double bytes, double flops = 0) { kernel({flops, bytes, {}}); }
  void matmul(const MatmulDims& dims, double bytes) { kernel({0, bytes, {dims}}); }
  void collective(Collective kind, double bytes) { collectives.push_back({kind, bytes}); }
};

struct BlockClass {
  std::string name;
  PhaseProfile forward;
  PhaseProfile input_grad;  // what the blocks before wait for
  PhaseProfile weight_grad;
  PhaseProfile selective;  // run again before backward under selective recompute; full: `forward`
  bool recomputed = true;  // false: keeps what it needs under any recompute
  double parameters = 0;   // elements on this tensor rank
  double shared_parameters =
      0;  // of them: copies of an earlier block's (tied head), reduced with it
  // Bytes a micro-batch leaves for its backward, by RecomputeMode.
  std::array<double, 3> stash_bytes = {0, 0, 0};
  double split_bytes = 0;      // what it leaves beside, of gradients, for delayed weight gradients
  double output_bytes = 0;     // to the next block, whole
  double transient_bytes = 0;  // most bytes alive inside the block beyond the stash
};

struct ModelProfile {
  std::vector<BlockClass> classes;
  std::vector<int> blocks;  // class of each block, in order
  int64_t micro_batch = 1;  // samples
  int tensor_parallel = 1;
  bool sequence_parallel = false;
  double model_flops_per_sample = 0;  // 3 x forward products, unpartitioned (CONTRACT: mfu)
  double tokens_per_sample = 0;       // 0: not a sequence model
  // Micro-batch outputs cross a stage border split over the tensor group, each rank its part.
  bool scattered_transfers = false;

  const BlockClass& block(int index) const {
    return classes[static_cast<size_t>(blocks[static_cast<size_t>(index)])];
  }
  int num_blocks() const { return static_cast<int>(blocks.size()); }
};

}  // namespace trainrt
