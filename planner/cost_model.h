// Seconds of an operator on a device from its FLOPs, bytes and shapes.
#pragma once

#include <string>
#include <vector>

#include "graph/cost.h"
#include "parallel/topology.h"

namespace trainrt {

// How near a kind of device comes to its data sheet. One set per architecture, the same for every
// model and machine; each figure is bounded by what published kernels reach (see cost_model.cc).
struct DeviceConstants {
  double matmul_efficiency = 0.8;       // of the matrix units' peak, large products without waste
  double small_tile_loss = 0.35;        // how much a quarter-size tile loses against the largest
  double prologue_k = 128;              // filling a tile's pipeline costs this many steps of k
  double attention_efficiency = 0.5;    // of the peak, fused attention, forward; backward 0.8 of it
  double roofline_leak = 0.3;           // of the lesser of arithmetic and memory time, not hidden
  double memory_efficiency = 0.85;      // of the memory's peak, large streams
  double memory_ramp_bytes = 2e6;       // a stream of this many bytes reaches half of that
  double vector_efficiency = 0.5;       // of the fp32 peak, for work outside the matrix units
  double launch_seconds = 4e-6;         // one kernel, start to end, at least
  double gap_seconds = 1e-6;            // between two kernels of a stream
  double overlap_slowdown = 1.15;       // compute, while a collective runs beside it
  double unaligned_slowdown = 1.6;      // products with rows that are no multiple of 16 bytes
  double partial_line_slowdown = 1.15;  // ... of 128 bytes
  int tile = 256;                       // largest tile: tile x tile / 2
};

DeviceConstants constants_for(const std::string& architecture);
// The architecture's, with what is known of this device in their place. Throws kInvalidArgument for
// a figure outside its range.
DeviceConstants constants_for(const DeviceType& device);

// Between a GPU and its host's memory, bytes per second in each direction.
double host_link_bandwidth(const std::string& architecture);

// A constant under the name that a device file gives it (efficiency_names()), and between which
// values hardware can lie.
struct NamedConstant {
  std::string name;
  double DeviceConstants::*field;
  double low, high;
};
const std::vector<NamedConstant>& named_constants();

class CostModel {
 public:
  // `precision` is that of the matrix products: "bf16", "fp16", "tf32", "fp32", "fp64".
  CostModel(const DeviceType& device, const std::string& precision);
  CostModel(const DeviceType& device,
            const std::string& precision,
            const DeviceConstants& constants);

  // Arithmetic of one product: tiles in waves over the multiprocessors, least over tile sizes.
  double matmul_seconds(const MatmulDims& dims) const;
  // Streams `bytes` and computes `flops` outside the matrix units.
  double stream_seconds(double bytes, double flops) const;
  // One kernel.
  double op_seconds(const Cost& cost, bool fused_attention = false) const;
  // One kernel of a CPU, by the samples of this name (planner/kernel_sample.h) where the device has
  // some, and no less than it takes to move its operands.
  double kernel_seconds(const std::string& name,
                        const KernelSample& size,
                        const Cost& cost,
                        double moving_seconds) const;
  // Moves bytes that were last used `distance` bytes ago.
  double move_seconds(double bytes, double distance) const;

  double peak_flops() const { return peak_; }
  // Elements of a row of operands by which Tensor Cores load it: pieces of 16 bytes, and, fastest,
  // lines of 128. Empty where no Tensor Core asks: on CPUs, in fp32 and in fp64.
  std::vector<int64_t> row_multiples() const;
  const DeviceConstants& constants() const { return constants_; }
  const DeviceType& device() const { return device_; }

 private:
  DeviceType device_;
  DeviceConstants constants_;
  double peak_;
  double vector_peak_;
  int64_t piece_ = 0;  // elements of 16 bytes; 0: rows of any length are alike
};

}  // namespace trainrt
