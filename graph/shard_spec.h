// How an operator can be split over devices, said once per operator and read by planner and
// partition alike.
//
// A rule names factors (after OpenXLA Shardy's sharding rules): independent loops of the operator
// with a size each. Every dim of every input and output is an ordered product of factors (major to
// minor), so that Reshape, fused QKV, Concat and Slice can be said. Sharding a factor over a mesh
// axis shards every dim in which it is the major-most factor and replicates the tensors it does not
// occur in.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "graph/attribute.h"

namespace trainrt {

class OpContext;

enum class ReductionKind : uint8_t { kSum, kMax, kMin };

// kParallel: shards run independently. kReduction: sharding it leaves a `partial` output, to be
// reduced. kHalo: neighbours' borders are needed (spatial dims of a convolution). kWhole: cannot be
// sharded.
enum class FactorKind : uint8_t { kParallel, kReduction, kHalo, kWhole };

struct Factor {
  std::string name;
  int64_t size = 1;
  FactorKind kind = FactorKind::kParallel;
  ReductionKind reduction = ReductionKind::kSum;
};

using DimFactors = std::vector<int>;            // indices into ShardingRule::factors, major first
using TensorFactors = std::vector<DimFactors>;  // one entry per dim

struct ShardingRule {
  std::vector<Factor> factors;
  std::vector<TensorFactors> inputs;  // one entry per input; empty TensorFactors for absent ones
  std::vector<TensorFactors> outputs;
  // Sets of inputs in which the operator is linear taken together: when exactly the inputs of one
  // set are `partial` sums, the outputs are partial sums. MatMul: {{0}, {1}}; Add: {{0, 1}}.
  std::vector<std::vector<int>> linear;

  // Index of the factor called `name`, -1 if there is none.
  int find(std::string_view name) const;
};

// One shard of one factor: elements [offset, offset + size) of `full_size`.
struct FactorShard {
  int factor = -1;
  int64_t offset = 0;
  int64_t size = 0;
  int64_t full_size = 0;
};

// Rewrites a node's attributes for one shard (Reshape's shape, a vocabulary-parallel Gather's
// offset). Receives the operator with whole types.
using LocalizeFn = std::function<Attributes(const OpContext& op, const FactorShard& shard)>;

// Builds a ShardingRule:
//   Factors(op, "b m k, b k n -> b m n").reduction("k").linear({{0}, {1}})
// One letter-word per dim; "(h d)" makes a dim the product of h and d (sizes of all but one factor
// of a product must be known from elsewhere or given by size()); "1" is a dim without a factor;
// "..." stands for leading dims aligned from the right as in broadcasting (dims of size 1 then
// carry no factor). An input that is absent is written as "_".
class Factors {
 public:
  Factors(const OpContext& op, std::string_view equation);

  // All inputs and outputs broadcast against output 0, every dim a parallel factor.
  static Factors elementwise(const OpContext& op);
  // Every dim of every tensor whole: the operator runs replicated.
  static Factors whole(const OpContext& op);

  Factors& size(std::string_view factor, int64_t size);
  Factors& reduction(std::string_view factor, ReductionKind kind = ReductionKind::kSum);
  Factors& halo(std::string_view factor);
  Factors& whole(std::string_view factor);
  // Marks the factor of dim `axis` of output 0 as whole (Softmax's axis).
  Factors& whole_axis(int axis);
  Factors& linear(std::vector<std::vector<int>> sets);

  operator ShardingRule() const;  // NOLINT(google-explicit-constructor): reads as a rule

 private:
  Factors() = default;
  ShardingRule rule_;
};

}  // namespace trainrt
