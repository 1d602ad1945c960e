// A kernel's rate changes slowly with the logarithm of its dims, by the blocking that the library
// chooses and by what fits into which cache; its time itself is nearly work over rate. So rates are
// averaged, each sample counting by the inverse fourth power of its distance in dims: a sample of
// the same size decides alone.
#include "planner/kernel_sample.h"

#include <algorithm>
#include <cmath>

namespace trainrt {

namespace {

// Of comparable kernels, seconds grow in proportion to it.
double work_of(const KernelSample& sample) {
  return sample.m > 0 ? sample.batch * sample.m * sample.n * sample.k : std::max(1.0, sample.bytes);
}

double distance(const KernelSample& a, const KernelSample& b) {
  const auto ratio = [](double x, double y) {
    return std::log2(std::max(1.0, x) / std::max(1.0, y));
  };
  if (a.m <= 0 || b.m <= 0) {
    constexpr double kRows = 3;  // rows of another length may well run another way
    return std::hypot(ratio(a.bytes, b.bytes), kRows * ratio(a.n, b.n));
  }
  return std::hypot(std::hypot(ratio(a.batch, b.batch), ratio(a.m, b.m)),
                    std::hypot(ratio(a.n, b.n), ratio(a.k, b.k)));
}

}  // namespace

std::string kernel_name(const Node& node) {
  std::string name = node.op_type;
  for (const char* flag : {"trans_a", "trans_b"}) {
    if (node.attributes.get_int(flag, 0) != 0) {
      name += concat("/", flag);
    }
  }
  return name;
}

KernelSample stream_size(double bytes) {
  KernelSample size;
  size.bytes = bytes;
  return size;
}

KernelSample kernel_size(const OpContext& op, const Cost& cost) {
  KernelSample size = stream_size(cost.bytes);
  if (cost.matmuls.empty() && op.num_inputs() > 0 && op.has_input(0) &&
      !op.input_shape(0).empty()) {
    size.n = static_cast<double>(op.input_shape(0).back());
  }
  double most = 0;
  for (const MatmulDims& dims : cost.matmuls) {
    if (dims.flops() > most) {
      most = dims.flops();
      size.batch = static_cast<double>(dims.batch);
      size.m = static_cast<double>(dims.m);
      size.n = static_cast<double>(dims.n);
      size.k = static_cast<double>(dims.k);
    }
  }
  return size;
}

double interpolate(const std::vector<KernelSample>& samples, const KernelSample& size) {
  constexpr double kNear = 0.05;  // dims that differ by so little are the same
  double weights = 0, sum = 0;
  for (const KernelSample& sample : samples) {
    const double d = std::max(kNear, distance(sample, size));
    const double weight = 1 / (d * d * d * d);
    weights += weight;
    sum += weight * std::log(sample.seconds / work_of(sample));
  }
  return work_of(size) * std::exp(sum / weights);
}

}  // namespace trainrt
