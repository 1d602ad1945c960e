#include "ops/localize.h"

namespace trainrt {

Attributes localize_output_shape(const OpContext& op,
                                 const FactorShard& shard,
                                 const std::string& name) {
  const ShardingRule rule = get_op(op.node().op_type).sharding(op);
  Attributes attributes = op.attributes();
  std::vector<int64_t> shape = attributes.get_ints(name);
  for (size_t d = 0; d < shape.size(); ++d) {
    const DimFactors& factors = rule.outputs.at(0).at(d);
    if (!factors.empty() && factors[0] == shard.factor) {
      shape[d] = shape[d] / shard.full_size * shard.size;
    }
  }
  attributes.set(name, std::move(shape));
  return attributes;
}

}  // namespace trainrt
