// Kernels that do two nodes' work at once: a matrix product with the activation after it, which a
// library computes before the product's result leaves the registers. The graph knows nothing of
// them: whoever binds a program to a device asks for one where two nodes follow each other.
#pragma once

#include <functional>

#include "graph/op_def.h"

namespace trainrt {

// The second node reads the first one's only output as its input `joined`.
struct NodePair {
  const OpContext& first;
  const OpContext& second;
  int joined = 0;
  bool keeps = false;  // what the first makes is to be there afterwards, too
};

// The kernel's context has the first node, the inputs of the first and then of the second, and the
// outputs likewise. When what the first makes is not kept, the two outputs have one address; the
// second output touches no other memory of the pair. An empty kernel: the pair has to run as two.
using KernelPairFactory = std::function<Kernel(const NodePair&, const DeviceSpec&)>;

struct RegisterKernelPair {
  RegisterKernelPair(const char* first,
                     const char* second,
                     Backend backend,
                     KernelPairFactory factory);
};

// Nodes further apart stay two.
inline constexpr size_t kPairReach = 8;  // a weight's gradient, its sum of squares and the like

// By which of its inputs a GPU may compute the node with the product that makes it: an epilogue of
// cuBLASLt, whose Gelu is the one by tanh. -1: by none. Known without a GPU and its kernels, for
// programs and their memory are planned for pairs.
int epilogue_input(const Graph& graph, const Node& node);

bool has_kernel_pair(const std::string& first, const std::string& second, const DeviceSpec& spec);
Kernel make_kernel_pair(const NodePair& pair, const DeviceSpec& spec);

// For kernels of a pair that find out at their first run that it has to be two.
void run_one_by_one(const Kernel& first,
                    const Node& second_node,
                    const Kernel& second,
                    KernelContext& context);

}  // namespace trainrt
