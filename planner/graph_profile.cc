// Kernels: each node's cost at the types one tensor rank sees. The forward's factors come from the
// sharding search; a backward node is split along the factor by which its largest split input is.
// What is kept for the backward is told by planner/kept_values. A backward node that no earlier
// block's gradient waits for belongs to the weight gradient.
#include "planner/graph_profile.h"

#include <algorithm>
#include <optional>
#include <set>

#include "graph/base/error.h"
#include "parallel/passes/padding.h"
#include "planner/kept_values.h"
#include "planner/kernel_sample.h"
#include "planner/shard_part.h"
#include "planner/shared_shardings.h"

namespace trainrt {

namespace {

class Profiler {
 public:
  explicit Profiler(const GraphProfileRequest& request)
      : request_(request),
        model_(*request.model),
        graph_(model_.graph),
        scale_(request.float_bytes / 4) {}

  GraphProfile run() {
    GraphProfile result;
    ModelProfile& profile = result.profile;
    profile.micro_batch = model_.micro_batch;
    profile.tensor_parallel = request_.tensor_parallel;
    profile.sequence_parallel = request_.sequence_parallel && request_.tensor_parallel > 1;
    profile.scattered_transfers = profile.sequence_parallel;
    profile.tokens_per_sample = model_.tokens_per_sample;
    profile.blocks = model_.blocks;
    result.last_source = model_.last_source;
    result.parameters = model_.num_parameters;
    result.num_nodes = model_.num_nodes;
    result.optimizer_bytes = model_.optimizer_bytes;
    ShardingRequest search;
    search.graph = &graph_;
    search.facts = model_.facts.get();
    search.trained = &model_.trained;
    search.cost = request_.cost;
    search.group = request_.tensor_group;
    search.degree = request_.tensor_parallel;
    search.sequence_parallel = profile.sequence_parallel;
    search.split_at_any_price = request_.split_at_any_price;
    search.pins = request_.pins;
    if (request_.split_for_memory) {
      search.whole_seconds_per_byte = 1e-8;  // more than what is spared by holding a matrix whole
    }
    const std::vector<BlockSharding> shardings = shard_blocks(model_, search);
    std::vector<double> flops;
    for (size_t c = 0; c < model_.classes.size(); ++c) {
      const Block& block = model_.classes[c];
      profile.classes.push_back(make_class(static_cast<int>(c), block, shardings[c]));
      BlockClass& made = profile.classes.back();
      made.shared_parameters = std::min(model_.shared_parameters[c], made.parameters);
      flops.push_back(forward_flops(block));
    }
    double sum = 0;
    for (size_t b = 0; b < model_.blocks.size(); ++b) {
      const auto c = static_cast<size_t>(model_.blocks[b]);
      sum += flops[c];
      for (size_t i = 0; i < model_.parameters[c].size(); ++i) {
        const auto found = shardings[c].placements.find(model_.parameters[c][i]);
        if (found != shardings[c].placements.end() &&
            found->second.kind == Placement::Kind::kShard) {
          result.placements[model_.parameter_names[b][i]] = Placement::shard(found->second.dim);
        }
      }
      for (size_t i = 0; i < model_.products[c].size(); ++i) {
        const auto found = padded_.find(model_.graph.node(model_.products[c][i]).name);
        if (found != padded_.end() && !model_.product_names[b][i].empty()) {
          result.padding[model_.product_names[b][i]] = found->second;
        }
      }
    }
    profile.model_flops_per_sample = 3 * sum / static_cast<double>(model_.micro_batch);
    return result;
  }

 private:
  double forward_flops(const Block& block) const {
    double sum = 0;
    for (const NodeId id : block.forward) {
      sum += model_.facts->matmul_flops(graph_, id);
    }
    return sum;
  }

  double bytes(ValueId id, const BlockSharding& sharding) const {
    const Value& value = graph_.value(id);
    double size = static_cast<double>(value.type.bytes());
    size *= value.type.dtype == DType::kFloat32 ? scale_ : 1;
    const auto found = sharding.placements.find(id);
    return found == sharding.placements.end()
               ? size
               : largest_part(size, value.type.shape, found->second, request_.tensor_parallel);
  }

  Cost scaled(Cost cost) const {
    cost.bytes *= scale_;
    return cost;
  }

  // The node as one tensor rank sees it.
  OpContext context(NodeId id, int factor) const {
    const Node& node = graph_.node(id);
    return request_.tensor_parallel == 1 || factor < 0
               ? OpContext(graph_, node)
               : local_context(graph_,
                               node,
                               model_.facts->rule(graph_, id),
                               factor,
                               request_.tensor_parallel);
  }

  // The multiple that the node's dims are padded to under the given plan, or where it pays; 1: as
  // it is. What it takes goes to `found`.
  std::optional<NodePadding> padding_of(
      NodeId id, int factor, const OpContext& op, const Cost& plain, PaddedNode* found) const {
    const Node& node = graph_.node(id);
    if (plain.matmuls.empty() || request_.cost == nullptr) {
      return std::nullopt;
    }
    std::vector<int64_t> multiples;
    if (request_.pins != nullptr && !request_.pins->padding.empty()) {
      const auto pinned = request_.pins->padding.find(node.name);
      if (pinned != request_.pins->padding.end()) {
        multiples = {pinned->second};
      }
    } else if (request_.choose_padding) {
      multiples = request_.cost->row_multiples();
    }
    if (multiples.empty()) {
      return std::nullopt;
    }
    const bool is_whole = request_.tensor_parallel == 1 || factor < 0;
    const ShardingRule own = is_whole ? ShardingRule{} : get_op(node.op_type).sharding(op);
    const ShardingRule& rule = is_whole ? model_.facts->rule(graph_, id) : own;
    const bool given = multiples.size() == 1;  // the device's are two
    std::optional<NodePadding> best;
    found->plain_seconds = request_.cost->op_seconds(plain);
    found->plain_flops = plain.matmul_flops();
    found->plain_bytes = plain.bytes;
    for (const int64_t multiple : multiples) {
      NodePadding padding = multiple > 1 ? node_padding(op, rule, multiple) : NodePadding{};
      if (!padding.any) {
        continue;
      }
      Cost cost = plain;
      cost.matmuls = padding.products;
      const double copy = static_cast<double>(padding.copied_bytes) * scale_;
      const double seconds =
          request_.cost->op_seconds(cost) + request_.cost->op_seconds({0, copy, {}});
      if (given || seconds < (best ? found->seconds : found->plain_seconds)) {
        found->multiple = multiple;
        found->seconds = seconds;
        found->flops = cost.matmul_flops();
        found->bytes = plain.bytes + copy;
        best = std::move(padding);
      }
    }
    return best;
  }

  static bool is_fused_attention(const Node& node) {
    return node.op_type.find("Attention") != std::string::npos;
  }

  void emit(NodeId id, int factor, PhaseProfile* phase) {
    const Node& node = graph_.node(id);
    const OpContext op = context(id, factor);
    Cost cost = scaled(get_op(node.op_type).cost(op));
    PaddedNode padded;
    if (const std::optional<NodePadding> padding = padding_of(id, factor, op, cost, &padded)) {
      cost.matmuls = padding->products;
      phase->stream(static_cast<double>(padding->copied_bytes) * scale_);
      padded_[node.name] = padded;
    }
    const bool sums =
        node.op_type == "BatchNormGradSums" && node.attributes.get_int("fixed", 0) == 0;
    if (sums || node.op_type == "BatchNormMoments") {
      phase->statistics_bytes.push_back(
          static_cast<double>(graph_.value(node.outputs[0]).type.bytes()));
    }
    if (request_.rearranges_images && node.op_type.starts_with("Conv")) {
      phase->stream(2 * cost.bytes);
    }
    if (cost.bytes > 0 || cost.flops > 0 || !cost.matmuls.empty()) {
      const KernelSample size = kernel_size(op, cost);
      phase->kernels.push_back(
          {std::move(cost), is_fused_attention(node), kernel_name(node), size});
    }
  }

  void backward(const Block& block, const BlockSharding& sharding, BlockClass* result) {
    std::map<ValueId, Placement> placements = sharding.placements;
    for (const NodeId id : block.backward) {
      const Node& node = graph_.node(id);
      int factor = -1;
      if (request_.tensor_parallel > 1) {
        const ShardingRule& rule = model_.facts->rule(graph_, id);
        factor = inherited_factor(graph_, node, placements, request_.tensor_parallel, rule);
        for (size_t o = 0; factor >= 0 && o < node.outputs.size() && o < rule.outputs.size(); ++o) {
          for (size_t d = 0; d < rule.outputs[o].size(); ++d) {
            if (!rule.outputs[o][d].empty() && rule.outputs[o][d][0] == factor) {
              placements[node.outputs[o]] = Placement::shard(
                  static_cast<int>(d), rule.factors[static_cast<size_t>(factor)].size);
            }
          }
        }
      }
      emit(id,
           factor,
           model_.awaited[static_cast<size_t>(id)] ? &result->input_grad : &result->weight_grad);
    }
    result->input_grad.collectives.insert(
        result->input_grad.collectives.end(), sharding.backward.begin(), sharding.backward.end());
  }

  BlockClass make_class(int block_class, const Block& block, const BlockSharding& sharding) {
    BlockClass result;
    result.name = graph_.node(block.forward.front()).name;
    for (const NodeId id : block.forward) {
      const auto found = sharding.factor.find(id);
      emit(id, found == sharding.factor.end() ? -1 : found->second, &result.forward);
    }
    result.forward.collectives = sharding.forward;
    for (TensorCollective& c : result.forward.collectives) {
      c.bytes *= scale_;
    }
    backward(block, sharding, &result);
    for (TensorCollective& c : result.input_grad.collectives) {
      c.bytes *= scale_;
    }
    std::set<ValueId> seen;
    for (const NodeId id : block.forward) {
      for (const ValueId input : graph_.node(id).inputs) {
        if (input != kNoValue && graph_.value(input).kind == ValueKind::kParameter &&
            seen.insert(input).second) {
          const Shape& shape = graph_.value(input).type.shape;
          const double size = static_cast<double>(num_elements(shape));
          const auto found = sharding.placements.find(input);
          result.parameters +=
              found == sharding.placements.end()
                  ? size
                  : largest_part(size, shape, found->second, request_.tensor_parallel);
        }
      }
    }
    stash(block_class, block, sharding, &result);
    if (block.output != kNoValue) {
      result.output_bytes = bytes(block.output, {});
    }
    for (const ValueId id : block.also_crossing) {
      result.output_bytes += bytes(id, {});
    }
    return result;
  }

  void stash(int block_class,
             const Block& block,
             const BlockSharding& sharding,
             BlockClass* result) {
    std::map<std::string, Placement> placements;
    for (const auto& [id, placement] : sharding.placements) {
      placements[graph_.value(id).name] = placement;
    }
    BlockBytesRequest wanted;
    wanted.model = request_.memory != nullptr ? request_.memory : &model_;
    wanted.placements = &placements;
    wanted.known = &graph_;
    wanted.tensor_parallel = request_.tensor_parallel;
    wanted.float32_scale = request_.memory != nullptr ? 1 : scale_;
    wanted.device = request_.device;
    const BlockBytes bytes = block_bytes(wanted, block_class);
    result->stash_bytes = bytes.kept;
    result->transient_bytes = bytes.transient;
    result->split_bytes = bytes.split;
    const std::set<NodeId> rerun = kept_values(graph_, block).rerun;
    for (const NodeId id : block.forward) {
      if (rerun.count(id) != 0) {
        const auto found = sharding.factor.find(id);
        emit(id, found == sharding.factor.end() ? -1 : found->second, &result->selective);
      }
    }
  }

  const GraphProfileRequest& request_;
  const ModelBlocks& model_;
  const Graph& graph_;
  double scale_;
  std::map<std::string, PaddedNode> padded_;  // nodes of the classes
};

}  // namespace

GraphProfile graph_profile(const GraphProfileRequest& request) {
  return Profiler(request).run();
}

}  // namespace trainrt
