// What the numbers in a weight say about its role: masks and tables of positions are buffers that
// the exporter wrote as initializers like any parameter, and two equal matrices may have been one.
// Only data inside the model file is looked at.
#pragma once

#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/onnx_translate.h"

namespace trainrt {

// Elements of a weight that is small enough to be looked at; empty when it is not, or not in the
// file.
std::vector<double> inspected_elements(const Value& value, bool inlined);

// "" or why this float initializer is a buffer and no parameter. `multiplied`: it is the weight of
// a product, a convolution or the like, where a mask hardly ever stands: its first row is looked at
// alone, so that a model's bulk is not read.
std::string buffer_reason(const Value& value, const WeightCandidate& candidate, bool multiplied);

// Pairs (later, earlier) of matrices with equal elements, as they are or transposed: an exporter
// that folds a transpose into a tied head makes two weights of one.
std::vector<std::pair<ValueId, ValueId>> lost_ties(const Graph& graph,
                                                   const std::vector<WeightCandidate>& candidates);

}  // namespace trainrt
