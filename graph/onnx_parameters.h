// Which tensors of the file are trained, which are state, which are constants: the question that no
// inference importer has to answer.
//
//   parameter  a float initializer on a differentiable path to a float output; or a Constant node's
//              tensor in the place of a weight (models whose exporter writes no initializers)
//   state      what an operator updates besides (BatchNormalization's running statistics), by
//   position frozen     would be a parameter, but --trainable or --freeze say otherwise constant
//   integers, single numbers the exporter invented, masks, and what no gradient reaches unused no
//   node that matters reads it
#pragma once

#include <string>
#include <vector>

#include "graph/onnx_import.h"
#include "graph/onnx_translate.h"

namespace trainrt {

// Exporters merge initializers that merely have equal values into one and put Identity nodes in the
// place of the others. Trained as one they would be tied. True if `copy_name`, the Identity's
// output, reads like a parameter of its own and the values are of the kind that are equal by
// chance: all elements the same, as a fresh LayerNorm's weights or a fresh bias. Equal random
// values are a true tie.
bool is_false_tie(const Value& original,
                  const WeightCandidate& candidate,
                  const std::string& copy_name);

// False for a model exported in training mode: there such merges compare storage, so ties are true.
bool may_have_false_ties(const onnx::GraphProto& graph);

// Gives each candidate its kind and reason, drops unused ones, and reports on all of them. Throws
// kInvalidArgument for a glob that matches nothing.
std::vector<TensorReport> assign_roles(Graph& graph,
                                       const std::vector<WeightCandidate>& candidates,
                                       const BindOptions& options);

}  // namespace trainrt
