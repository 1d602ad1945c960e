// An OpExample made concrete: a graph of one node with drawn inputs, and ways to run that node.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/op_def.h"

namespace trainrt::testing {

struct RunOptions {
  bool reference = true;
  bool reverse_blocks = false;     // parallel_for calls the last block first
  int threads = 1;                 // that the kernel is told of; blocks run one after the other
  const Inplace* alias = nullptr;  // this output is the input's memory
};

// An operator's name as part of a test's: letters, digits and underscores.
std::string test_name(const std::string& op);

// Types, attributes and contents of one node without a graph around it.
struct NodeCase {
  Node node;
  TensorTypes input_types;
  std::vector<bool> present;
  std::vector<Tensor> inputs;  // undefined where absent
  TensorTypes output_types;

  // Dead code elimination takes away what nobody reads of a node with several outputs.
  void drop_output(size_t i) { node.outputs[i] = kNoValue; }
  bool has_output(size_t i) const { return node.outputs[i] != kNoValue; }
  OpContext context() const { return {node, input_types, present, output_types}; }
};

// Inputs drawn from a generator seeded by operator and example name. With `floats` other than
// float32, float32 inputs take that dtype, but for statistics beside 16-bit floats.
NodeCase make_case(const OpDef& op, const OpExample& example, DType floats = DType::kFloat32);

// Outputs of the node. Outputs and workspace start out as garbage, so that nothing may rely on
// zeros. A dropped output is undefined.
std::vector<Tensor> run_case(const NodeCase& test_case, const RunOptions& options = {});

// The case as a graph: inputs that may be differentiated are parameters (feeds has their contents),
// all others constants.
struct GraphCase {
  Graph graph;
  NodeId node = 0;
  std::vector<ValueId> checked;  // inputs whose gradient is checked
  std::map<std::string, Tensor> feeds;
};
GraphCase make_graph(const NodeCase& test_case, const OpExample& example);

}  // namespace trainrt::testing
