// A node as far as its time on a CPU depends on it: which kernel, how large.
#pragma once

#include <string>

#include "graph/op_def.h"
#include "parallel/topology.h"

namespace trainrt {

// "MatMul", "MatMul/trans_b": what kernels of one name have in common is how fast they are at a
// size.
std::string kernel_name(const Node& node);

// The size of a kernel, without its time; `cost` is the operator's.
KernelSample kernel_size(const OpContext& op, const Cost& cost);
// Of what moves bytes and no more.
KernelSample stream_size(double bytes);

// Seconds of a kernel of `size`, from samples of its name: its work at the rates of the nearest
// ones. `samples` is not empty.
double interpolate(const std::vector<KernelSample>& samples, const KernelSample& size);

}  // namespace trainrt
