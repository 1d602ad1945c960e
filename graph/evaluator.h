// Runs nodes on the host, one after the other, each output in memory of its own: constant folding,
// and tests of operators and gradients that want no program, plan or arena.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/kernel.h"

namespace trainrt {

struct EvaluateOptions {
  bool reference_kernels = true;
  StepContext step;
};

// The outputs of one node (undefined tensors for absent outputs). `inputs` has one entry per input,
// undefined where absent.
std::vector<Tensor> evaluate_node(const Graph& graph,
                                  const Node& node,
                                  const std::vector<Tensor>& inputs,
                                  const EvaluateOptions& options = {});

// Runs the whole graph. `feeds` has the inputs, and parameters or state where their sources shall
// not be used, by name. Returns the values of `fetches`, by id, in order. In-place operators work
// on copies, so feeds are never changed.
std::vector<Tensor> evaluate(const Graph& graph,
                             const std::map<std::string, Tensor>& feeds,
                             const std::vector<ValueId>& fetches,
                             const EvaluateOptions& options = {});

// The initial contents of a value without producer: its constant, its source, or zeros.
Tensor initial_value(const Value& value);

}  // namespace trainrt
