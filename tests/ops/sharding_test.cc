// Every operator, sharded along every factor its rule allows, against the whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "graph/op_def.h"
#include "tests/support/op_example.h"
#include "tests/support/tolerance.h"

namespace trainrt::testing {
namespace {

// Elements [offset, offset + size) of dim `axis`.
Tensor slice(const Tensor& tensor, size_t axis, int64_t offset, int64_t size) {
  Shape shape = tensor.shape();
  const int64_t outer = dims_product(shape, 0, static_cast<int>(axis));
  const int64_t full = shape[axis];
  shape[axis] = size;
  Tensor result(tensor.dtype(), shape);
  const int64_t row = full == 0 ? 0 : tensor.bytes() / std::max<int64_t>(1, outer * full);
  for (int64_t o = 0; o < outer; ++o) {
    std::memcpy(result.raw() + o * size * row,
                tensor.raw() + (o * full + offset) * row,
                static_cast<size_t>(size * row));
  }
  return result;
}

// The part of a tensor that one shard of a factor sees.
Tensor shard_of(const Tensor& tensor, const TensorFactors& factors, const FactorShard& shard) {
  Tensor result = tensor;
  for (size_t d = 0; d < factors.size(); ++d) {
    if (!factors[d].empty() && factors[d][0] == shard.factor) {
      const int64_t unit = tensor.shape()[d] / shard.full_size;
      result = slice(result, d, shard.offset * unit, shard.size * unit);
    }
  }
  return result;
}

bool contains(const TensorFactors& factors, int factor) {
  return std::any_of(factors.begin(), factors.end(), [factor](const DimFactors& dim) {
    return std::find(dim.begin(), dim.end(), factor) != dim.end();
  });
}

// A factor below another one in some dim cannot be cut into contiguous shards.
bool is_major_everywhere(const ShardingRule& rule, int factor) {
  const auto major = [factor](const TensorFactors& factors) {
    return std::all_of(factors.begin(), factors.end(), [factor](const DimFactors& dim) {
      return std::find(dim.begin(), dim.end(), factor) == dim.end() || dim[0] == factor;
    });
  };
  return std::all_of(rule.inputs.begin(), rule.inputs.end(), major) &&
         std::all_of(rule.outputs.begin(), rule.outputs.end(), major);
}

NodeCase localize(const OpDef& op,
                  const NodeCase& whole,
                  const ShardingRule& rule,
                  const FactorShard& shard) {
  NodeCase local = whole;
  if (op.localize) {
    local.node.attributes = op.localize(whole.context(), shard);
  }
  for (size_t i = 0; i < whole.inputs.size(); ++i) {
    if (whole.present[i]) {
      local.inputs[i] = shard_of(whole.inputs[i], rule.inputs[i], shard);
      local.input_types[i].shape = local.inputs[i].shape();
    }
  }
  local.output_types.clear();
  local.output_types = op.infer_types(local.context());
  return local;
}

std::vector<double> reduce(std::vector<double> a,
                           const std::vector<double>& b,
                           ReductionKind kind) {
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = kind == ReductionKind::kSum   ? a[i] + b.at(i)
           : kind == ReductionKind::kMax ? std::max(a[i], b.at(i))
                                         : std::min(a[i], b.at(i));
  }
  return a;
}

class ShardingTest : public ::testing::TestWithParam<std::string> {};

// Cuts the factor into `parts` unequal shards (where the size does not divide) and runs each alone.
void check_factor(const OpDef& op,
                  const NodeCase& whole,
                  const ShardingRule& rule,
                  int index,
                  int64_t parts,
                  const std::vector<Tensor>& expected) {
  const Factor& factor = rule.factors[static_cast<size_t>(index)];
  SCOPED_TRACE(concat("factor ", factor.name, " of size ", factor.size, " in ", parts, " shards"));
  std::vector<std::vector<double>> reduced(expected.size());
  for (int64_t p = 0; p < parts; ++p) {
    const int64_t begin = factor.size * p / parts, end = factor.size * (p + 1) / parts;
    const FactorShard shard{index, begin, end - begin, factor.size};
    const NodeCase local = localize(op, whole, rule, shard);
    const std::vector<Tensor> outputs = run_case(local, {.reference = false});
    ASSERT_EQ(outputs.size(), expected.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      SCOPED_TRACE(concat("shard ", p, ", output ", i));
      const double tolerance = 4 * kernel_tolerance(expected[i].dtype());
      if (factor.kind == FactorKind::kReduction && !contains(rule.outputs[i], index)) {
        ASSERT_EQ(outputs[i].shape(), expected[i].shape());
        const std::vector<double> values = outputs[i].to_double();
        reduced[i] = p == 0 ? values : reduce(reduced[i], values, factor.reduction);
        if (p + 1 == parts) {
          const Tensor total =
              Tensor::from(reduced[i], expected[i].shape()).cast(expected[i].dtype());
          EXPECT_TRUE(tensors_near(total, expected[i], tolerance));
        }
      } else {
        EXPECT_TRUE(
            tensors_near(outputs[i], shard_of(expected[i], rule.outputs[i], shard), tolerance));
      }
    }
  }
}

TEST_P(ShardingTest, ShardsTogetherEqualTheWhole) {
  const OpDef& op = get_op(GetParam());
  for (const OpExample& example : op.examples) {
    if (!example.check_sharding) {
      continue;
    }
    SCOPED_TRACE("example '" + example.name + "'");
    const NodeCase whole = make_case(op, example);
    const ShardingRule rule = op.sharding(whole.context());
    const std::vector<Tensor> expected = run_case(whole);
    for (size_t f = 0; f < rule.factors.size(); ++f) {
      const Factor& factor = rule.factors[f];
      const bool shardable =
          factor.kind == FactorKind::kParallel || factor.kind == FactorKind::kReduction;
      if (!shardable || !is_major_everywhere(rule, static_cast<int>(f))) {
        continue;
      }
      for (const int64_t parts : {int64_t{2}, int64_t{3}}) {
        if (factor.size >= parts) {
          check_factor(op, whole, rule, static_cast<int>(f), parts, expected);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Registry,
                         ShardingTest,
                         ::testing::ValuesIn(op_names()),
                         [](const auto& row) { return test_name(row.param); });

}  // namespace
}  // namespace trainrt::testing
