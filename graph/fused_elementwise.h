// FusedElementwise: several element-wise operators as one node. Its attributes are a straight-line
// program over one element, so whatever handles nodes handles it as well.
//
// Every step gives a tensor of one shape, the node's; an input may be broadcast to it. A result is
// rounded to its step's type, as if it had been stored: the bits are those of the steps run one by
// one.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "graph/op_def.h"

namespace trainrt {

inline constexpr const char* kFusedElementwise = "FusedElementwise";

// "One functor on the elements of inputs that broadcast to the only output": may become a step
// where all of it is floating-point.
struct RegisterElementwise {
  explicit RegisterElementwise(const std::string& op_type);
};
bool is_elementwise(const std::string& op_type);

struct FusedStep {
  std::string op_type;
  Attributes attributes;
  std::vector<int> operands;  // below num_inputs: an input; from there on: an earlier step's result
};

struct FusedExpression {
  // What a kernel has room for.
  static constexpr size_t kMaxInputs = 8, kMaxOutputs = 8, kMaxSteps = 32;
  static constexpr size_t kMaxBroadcast = 4;  // inputs that are neither whole nor one element

  int num_inputs = 0;
  std::vector<FusedStep> steps;
  std::vector<int> outputs;  // the step that makes each

  Attributes to_attributes() const;
  static FusedExpression of(const Attributes& attributes);  // throws kInvalidModel
};

// The node of a step by itself.
Node step_node(const Node& fused, const FusedExpression& expression, size_t step);

// Types of the results of all steps. Throws kInvalidModel where a step refuses its operands, or
// where shapes differ.
TensorTypes fused_step_types(const FusedExpression& expression, const TensorTypes& inputs);

}  // namespace trainrt
