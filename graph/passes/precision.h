// --precision as a graph pass over the forward graph, before autodiff.
//
// Parameters, state and what the graph takes in and gives out keep float32: the parameters are the
// master weights of mixed precision, and since the gradient of a cast is a cast back, their
// gradients are accumulated, reduced and applied in float32 without another rule.
#pragma once

#include <string>

#include "graph/graph.h"

namespace trainrt {

// Every value of a floating-point type becomes `to` (float32 or float64): inputs, parameters,
// state, constants and what is computed from them, with the same names. float64 is for checks
// against references; float32 for files stored in 16 bits or in float64. What a file that has no
// parameters in float64 computes in float64 stays so: it asks for that there.
Graph convert_floats(const Graph& graph, DType to);

// Mixed precision: computes in `low` (float16 or bfloat16) what OpDef::precision allows, with casts
// as nodes named "<value>.<low>"; a value is cast at most once. `graph` has no 16-bit floats.
Graph lower_precision(const Graph& graph, DType low);

// Whether a finite number of `wide` is infinite in `narrow`, which was cast from it.
bool has_overflowed(const Tensor& wide, const Tensor& narrow);

// A graph whose outputs are its loss, before autodiff: softmax cross-entropy reads 16-bit scores as
// they lie, where a cast to float32 stood in between for it alone. Its sums stay in float32, so the
// loss has the same bits, and so has the scores' gradient, which was cast to the scores' type; but
// no float32 copy of either takes room and time.
void read_low_scores(Graph& graph);

// Applies one of CONTRACT's precisions, already resolved: "fp64", "fp32" (a file stored in 16 bits
// or in float64 is computed in float32, too), "bf16", "fp16". Throws kInvalidArgument for a name
// that is none, kUnsupported for "tf32", which a CPU does not have.
Graph apply_precision(const Graph& graph, const std::string& precision);

}  // namespace trainrt
