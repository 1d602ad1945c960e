// Which rows of a tensor belong to which sample, told to the operators that draw random numbers: a
// draw is a function of the sample and of the element within it (ops/random_draw.h), so that it
// does not depend on the micro-batch it comes in.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace trainrt {

// Attributes of random operators. Along `batch_axis` (-1: the tensor belongs to no sample) each
// sample has `rows_per_sample` rows, and `sample_stride` rows lie between one sample and the next:
// tokens of [batch * tokens, features] are `tokens` rows per sample at stride `tokens`, those of
// [tokens * batch, features] at stride 1.
namespace sample_rows {
inline constexpr const char* kBatchAxis = "batch_axis";
inline constexpr const char* kRowsPerSample = "rows_per_sample";
inline constexpr const char* kSampleStride = "sample_stride";
}  // namespace sample_rows

// Where the samples of a tensor lie: along `axis`, which is [outer, samples, inner] merged. [tokens
// * batch, features] has `tokens` outer, [batch * tokens, features] as many inner.
struct SamplePlace {
  int axis = 0;
  int64_t outer = 1, inner = 1;
};

// What becomes of the samples, in graphs of more than one. Nodes: the first of their kind, "" for
// none.
struct SampleCourse {
  std::string mixed;  // brings different samples together (a product of each with every other one)
  std::string met;    // brings a sample together with what was reduced over all samples
  std::string lost;   // the samples cannot be followed through it
  // By value: nothing where it is not known.
  std::vector<std::optional<SamplePlace>> places;
  // By value: reduced over the samples, or computed from what was.
  std::vector<bool> reduced;
  // By value: added up over the samples by the node that makes it, from nothing reduced before.
  std::vector<bool> summed;
  // By value: computed from an input that has samples.
  std::vector<bool> depends;
};
SampleCourse follow_samples(const Graph& graph);

// Follows the batch axes of the graph's inputs through the sharding rules of the operators and sets
// the attributes above on every random node. Forward graphs only: gradients copy the attributes.
//
// Returns the nodes whose samples cannot be followed (a Gather over samples, say): they draw for
// the micro-batch as a whole, and their draws depend on how a step is cut.
std::vector<std::string> locate_samples(Graph& graph);

}  // namespace trainrt
