// How a number that a graph computes of all its samples grows with them: a sum is twice as large
// when every sample is there twice, a mean stays.
#pragma once

#include <optional>

#include "graph/graph.h"
#include "graph/passes/sample_rows.h"

namespace trainrt {

enum class OfSamples : uint8_t {
  kSum,
  kMean,   // or made of no samples at all
  kOther,  // or not to be told
};

// `value`: computed in `graph`, whose samples take `course`. `doubled`: the same
// model at twice as many samples, which tells numbers of the model from numbers of samples; null:
// the model has no other size.
OfSamples of_samples(const Graph& graph,
                     const SampleCourse& course,
                     ValueId value,
                     const Graph* doubled);

// The power of their number as which it grows; nothing where that is not to be told.
std::optional<int> degree_in_samples(const Graph& graph,
                                     const SampleCourse& course,
                                     ValueId value,
                                     const Graph* doubled);

}  // namespace trainrt
