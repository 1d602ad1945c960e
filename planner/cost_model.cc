// Matrix products follow the tiling of the vendors' libraries: an output of m x n is cut into
// tiles, each computed by one multiprocessor over the whole k, so time = waves * (k + prologue) *
// tile work, where waves = ceil(batch * tiles / multiprocessors) and dims are padded to whole tiles
// (tile and wave quantisation, NVIDIA "Matrix Multiplication Background"). Smaller tiles waste less
// but re-read operands more often and so run slower per FLOP. With too few tiles k is split over
// multiprocessors, at the price of a reduction. The library picks the fastest; so do we. k is
// padded to 8 elements (fp16) and a row length that is no multiple of 8 halves the load width.
//
// Ranges of the constants: matmul_efficiency 0.70 to 0.90 of dense peak on A100 (cuBLAS at 4k to
// 16k: 250 to 280 of 312 TFLOP/s), 0.62 to 0.80 on H100 (power-limited, 620 to 780 of 989), 0.45 to
// 0.70 on B200 (SimuMax's table of 50 products in configs/system/b200_bf16_ceperm.json: 0.45 to
// 0.49 for those that last, 0.6 for those too short to reach the power limit; its attention 0.44
// forward, 0.36 backward, its memory 0.67 of 8 TB/s), 0.70 to 0.85 on V100, 0.40 to 0.70 on T4 (70
// W); memory_efficiency 0.75 to 0.93 of the data sheet (STREAM-like kernels); launch_seconds 2 to
// 10 us (AutoParallel measured 7); overlap_slowdown 1.1 to 1.3 (Galvatron measured 1.126).
// tests/planner/cost_model_test.cc holds them to these.
#include "planner/cost_model.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "graph/base/error.h"
#include "planner/kernel_sample.h"

namespace trainrt {

namespace {

double ceil_div(double a, double b) {
  return std::ceil(a / b);
}

}  // namespace

DeviceConstants constants_for(const std::string& architecture) {
  DeviceConstants c;  // generic
  if (architecture == "cpu") {
    c.matmul_efficiency = 0.85;
    c.small_tile_loss = 0;
    c.memory_efficiency = 0.8;
    c.memory_ramp_bytes = 0;
    c.vector_efficiency = 0.25;
    c.launch_seconds = 1e-6;
    c.gap_seconds = 0.2e-6;
    c.overlap_slowdown = 1.3;
    c.tile = 64;
  } else if (architecture == "volta") {
    c.matmul_efficiency = 0.75;
    c.memory_efficiency = 0.85;
  } else if (architecture == "turing") {
    c.matmul_efficiency = 0.42;
    c.memory_efficiency = 0.8;
  } else if (architecture == "ampere") {
    c.matmul_efficiency = 0.83;
    c.memory_efficiency = 0.85;
    c.attention_efficiency = 0.40;
  } else if (architecture == "hopper") {
    c.matmul_efficiency = 0.69;
    c.memory_efficiency = 0.88;
    c.attention_efficiency = 0.28;
  } else if (architecture == "blackwell") {
    c.matmul_efficiency = 0.49;
    c.attention_efficiency = 0.44;
    c.memory_efficiency = 0.69;
  }
  return c;
}

const std::vector<NamedConstant>& named_constants() {
  using C = DeviceConstants;
  static const std::vector<NamedConstant> kNamed = {
      {"matmul", &C::matmul_efficiency, 0.35, 0.95},
      {"small_tile_loss", &C::small_tile_loss, 0, 0.6},
      {"prologue_k", &C::prologue_k, 16, 512},
      {"attention", &C::attention_efficiency, 0.15, 0.75},
      {"roofline_leak", &C::roofline_leak, 0, 0.6},
      {"memory", &C::memory_efficiency, 0.6, 0.95},
      {"memory_ramp_bytes", &C::memory_ramp_bytes, 0, 16e6},
      {"vector", &C::vector_efficiency, 0.1, 0.9},
      {"launch_seconds", &C::launch_seconds, 1e-6, 10e-6},
      {"gap_seconds", &C::gap_seconds, 0, 5e-6},
      {"overlap_slowdown", &C::overlap_slowdown, 1, 1.5},
  };
  return kNamed;
}

// Sixteen lanes of the PCIe generation that the architecture's server cards have (5, 4, 3: 63, 31.5
// and 15.8 GB/s [PCI-SIG]), of which large copies reach three quarters.
double host_link_bandwidth(const std::string& architecture) {
  const bool fifth = architecture == "hopper" || architecture == "blackwell";
  const bool fourth = architecture == "ampere" || architecture == "ada";
  return 0.75 * (fifth ? 63e9 : fourth ? 31.5e9 : 15.8e9);
}

DeviceConstants constants_for(const DeviceType& device) {
  DeviceConstants constants = constants_for(device.architecture);
  if (device.efficiency.empty()) {
    return constants;
  }
  for (const NamedConstant& constant : named_constants()) {
    const auto known = device.efficiency.find(constant.name);
    if (known == device.efficiency.end()) {
      continue;
    }
    // The ranges are those of GPUs; a CPU's figures are measured and differ by machine and load.
    const double low = device.is_cpu() ? 0 : constant.low;
    const double high = device.is_cpu() ? std::max(1.0, constant.high) : constant.high;
    TRAINRT_REQUIRE(known->second >= low && known->second <= high,
                    kInvalidArgument,
                    "device type '",
                    device.name,
                    "': efficiency ",
                    constant.name,
                    " lies between ",
                    low,
                    " and ",
                    high,
                    " on hardware, found ",
                    known->second);
    constants.*constant.field = known->second;
  }
  return constants;
}

CostModel::CostModel(const DeviceType& device, const std::string& precision)
    : CostModel(device, precision, constants_for(device)) {}

CostModel::CostModel(const DeviceType& device,
                     const std::string& precision,
                     const DeviceConstants& constants)
    : device_(device),
      constants_(constants),
      peak_(device.peak_flops(precision) * device.sustained),
      vector_peak_(device.peak_flops("fp32")),
      piece_(device.is_cpu() || precision == "fp32" || precision == "fp64" ? 0
             : precision == "tf32"                                         ? 4
                                                                           : 8) {}

std::vector<int64_t> CostModel::row_multiples() const {
  return piece_ == 0 ? std::vector<int64_t>{} : std::vector<int64_t>{piece_, 8 * piece_};
}

double CostModel::matmul_seconds(const MatmulDims& dims) const {
  if (dims.flops() <= 0) {
    return 0;
  }
  const double m = static_cast<double>(dims.m), n = static_cast<double>(dims.n);
  const double batch = static_cast<double>(dims.batch);
  const double sms = device_.num_sms;
  const double per_sm = peak_ * constants_.matmul_efficiency / sms;
  if (device_.is_cpu()) {  // blocked loops over whole matrices: padding to register tiles only
    return dims.flops() / (peak_ * constants_.matmul_efficiency);
  }
  const double t = constants_.tile;
  const double tiles[][2] = {
      {t, t / 2}, {t / 2, t}, {t / 2, t / 2}, {t / 2, t / 4}, {t / 4, t / 2}, {t / 4, t / 4}};
  double best = 1e30;
  for (const auto& tile : tiles) {
    const double area = tile[0] * tile[1] / (t * t / 2);  // 1, 1/2, 1/4, 1/8 of the largest
    // A tile's operand traffic grows as its perimeter over its area: linear in log area.
    const double efficiency = 1 + constants_.small_tile_loss * std::log2(area) / 4;
    const double count = batch * ceil_div(m, tile[0]) * ceil_div(n, tile[1]);
    for (const double split : {1, 2, 4, 8, 16}) {
      const double waves = ceil_div(count * split, sms);
      const double seconds =
          waves * 2 * tile[0] * tile[1] *
          (ceil_div(static_cast<double>(dims.k), 8 * split) * 8 + constants_.prologue_k) /
          (per_sm * efficiency);
      // Partial sums are written and read once more per part.
      const double reduction =
          split > 1 ? split * batch * m * n * 8 / (device_.memory_bandwidth * device_.speed) : 0;
      best = std::min(best, seconds + reduction);
      if (count * split >= sms) {
        break;
      }
    }
  }
  // Rows are loaded in 16-byte pieces, and fastest in whole 128-byte lines.
  if (piece_ == 0) {
    return best;
  }
  if (dims.k % piece_ != 0 || dims.n % piece_ != 0) {
    return best * constants_.unaligned_slowdown;
  }
  const int64_t line = 8 * piece_;
  const bool lines = (dims.k % line == 0 || dims.k < line) && (dims.n % line == 0 || dims.n < line);
  return lines ? best : best * constants_.partial_line_slowdown;
}

double CostModel::stream_seconds(double bytes, double flops) const {
  const double bandwidth = device_.memory_bandwidth * device_.speed * constants_.memory_efficiency;
  return std::max((bytes + constants_.memory_ramp_bytes * (bytes > 0 ? 1 : 0)) / bandwidth,
                  flops / (vector_peak_ * constants_.vector_efficiency));
}

double CostModel::op_seconds(const Cost& cost, bool fused_attention) const {
  if (cost.matmuls.empty() && cost.bytes == 0 && cost.flops == 0) {
    return 0;
  }
  double compute = 0;
  if (fused_attention) {
    // Two products forward; backward has five and reaches 0.8 of the rate.
    const double rate = constants_.attention_efficiency * (cost.matmuls.size() > 2 ? 0.8 : 1);
    compute = cost.matmul_flops() / (peak_ * rate);
  } else {
    for (const MatmulDims& dims : cost.matmuls) {
      compute += matmul_seconds(dims);
    }
  }
  const double stream = stream_seconds(cost.bytes, cost.flops);
  const double work =
      std::max(compute, stream) + constants_.roofline_leak * std::min(compute, stream);
  return std::max(work, constants_.launch_seconds) + constants_.gap_seconds;
}

double CostModel::move_seconds(double bytes, double distance) const {
  const std::vector<StreamSample>& streams = device_.streams;
  if (streams.empty()) {
    return bytes / (device_.memory_bandwidth * device_.speed * constants_.memory_efficiency);
  }
  size_t i = 0;
  while (i < streams.size() && distance > streams[i].working_set) {
    ++i;
  }
  double rate = streams[std::min(i, streams.size() - 1)].bytes_per_second;
  if (i > 0 && i < streams.size()) {  // between two, along the logarithm of the working set
    const StreamSample& less = streams[i - 1];
    const StreamSample& more = streams[i];
    const double along =
        std::log(distance / less.working_set) / std::log(more.working_set / less.working_set);
    rate = less.bytes_per_second * std::pow(more.bytes_per_second / less.bytes_per_second, along);
  }
  return bytes / (rate * device_.speed);
}

double CostModel::kernel_seconds(const std::string& name,
                                 const KernelSample& size,
                                 const Cost& cost,
                                 double moving_seconds) const {
  if (cost.matmuls.empty() && cost.bytes == 0 && cost.flops == 0) {
    return 0;
  }
  const auto found = device_.kernels.find(name);
  if (found == device_.kernels.end()) {
    return op_seconds(cost, name.find("Attention") != name.npos);
  }
  const double sampled = interpolate(found->second, size) / device_.speed;
  return std::max(sampled, moving_seconds) + constants_.gap_seconds;
}

}  // namespace trainrt
