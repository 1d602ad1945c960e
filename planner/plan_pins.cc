#include "planner/plan_pins.h"

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "graph/base/error.h"
#include "parallel/micro_batches.h"
#include "parallel/passes/padding.h"

namespace trainrt {

namespace {

std::string text_of(int value) {
  return std::to_string(value);
}
std::string text_of(int64_t value) {
  return std::to_string(value);
}
std::string text_of(bool value) {
  return value ? "true" : "false";
}
std::string text_of(ScheduleKind value) {
  return schedule_name(value);
}

class Pinner {
 public:
  Pinner(const Plan& plan,
         const std::set<std::string>& stated,
         const std::string& where,
         const Topology& topology,
         PlanPins* pins)
      : plan_(plan), stated_(stated), where_(where), topology_(topology), pins_(pins) {}

  void run() {
    pins_->from = where_;
    pin("--dp", "data_parallel", pins_->data, plan_.data_parallel);
    pin("--tp", "tensor_parallel", pins_->tensor, plan_.tensor_parallel);
    pin("--pp", "pipeline_parallel", pins_->pipeline, plan_.pipeline_parallel);
    pin("--virtual-stages", "virtual_stages", pins_->virtual_stages, plan_.virtual_stages);
    pin("--schedule", "schedule", pins_->schedule, plan_.schedule);
    pin("--zero", "zero_stage", pins_->zero_stage, plan_.zero_stage);
    pin("--sequence-parallel",
        "sequence_parallel",
        pins_->sequence_parallel,
        plan_.sequence_parallel);
    if (plan_.micro_batch_size > 0) {
      pin("--micro-batch-size", "micro_batch_size", pins_->micro_batch, plan_.micro_batch_size);
    }
    pins_->offload_optimizer = pins_->offload_optimizer || plan_.offload_optimizer;
    if (stated_.count("reduction") != 0) {
      pins_->exact_reduction = plan_.exact_reduction;
      pins_->logical_shards = plan_.logical_shards;
    }
    if (stated_.count("batch_norm") != 0) {
      pins_->sync_batch_norm = plan_.sync_batch_norm;
    }
    pins_->placements = plan_.placements;
    pins_->padding = plan_.padding;
    pin_stages();
    pin_shares();
    pin_devices();
    check_placements();
  }

 private:
  template <typename T>
  void pin(const char* flag, const char* key, std::optional<T>& pin, const T& value) {
    if (stated_.count(key) == 0) {
      return;
    }
    TRAINRT_REQUIRE(!pin.has_value() || *pin == value,
                    kInvalidArgument,
                    flag,
                    " ",
                    text_of(pin.value_or(value)),
                    " contradicts ",
                    where_,
                    ", where ",
                    key,
                    " is ",
                    text_of(value),
                    "; leave out one of them");
    pin = value;
  }

  // A degree that follows from a list of the plan.
  void imply(const char* what, const char* list, std::optional<int>& pin, int value) {
    TRAINRT_REQUIRE(!pin.has_value() || *pin == value,
                    kInvalidArgument,
                    where_,
                    ": ",
                    list,
                    " are for ",
                    value,
                    " ",
                    what,
                    ", and ",
                    pin.value_or(0),
                    " are wanted");
    pin = value;
  }

  void pin_stages() {
    const std::vector<PlanStage>& stages = plan_.stages;
    if (stages.empty()) {
      return;
    }
    int ranks = 0;
    for (const PlanStage& stage : stages) {
      ranks = std::max(ranks, stage.rank_stage + 1);
    }
    const int count = static_cast<int>(stages.size());
    imply("pipeline ranks", "the stages", pins_->pipeline, ranks);
    TRAINRT_REQUIRE(count % ranks == 0,
                    kInvalidArgument,
                    where_,
                    ": ",
                    count,
                    " stages cannot be dealt out evenly to ",
                    ranks,
                    " pipeline ranks");
    imply("virtual stages", "the stages", pins_->virtual_stages, count / ranks);
    int next = 0;
    for (int s = 0; s < count; ++s) {
      const PlanStage& stage = stages[static_cast<size_t>(s)];
      TRAINRT_REQUIRE(stage.virtual_stage == s && stage.rank_stage == s % ranks,
                      kInvalidArgument,
                      where_,
                      ": entry ",
                      s,
                      " of stages is virtual stage ",
                      stage.virtual_stage,
                      " on pipeline rank ",
                      stage.rank_stage,
                      ", wanted ",
                      s,
                      " on rank ",
                      s % ranks);
      TRAINRT_REQUIRE(stage.first_node == next && stage.last_node >= next,
                      kInvalidArgument,
                      where_,
                      ": stage ",
                      s,
                      " has the nodes [",
                      stage.first_node,
                      ", ",
                      stage.last_node,
                      "], but should begin at ",
                      next,
                      ": ",
                      std::abs(stage.first_node - next),
                      stage.first_node > next ? " nodes lie in no stage" : " nodes lie in two");
      next = stage.last_node + 1;
    }
    pins_->stages = stages;
    RecomputeMode least = RecomputeMode::kFull;
    for (const PlanStage& stage : stages) {
      least = std::min(least, stage.recompute);
      for (const RecomputeRun& run : stage.recompute_runs) {
        least = std::min(least, run.mode);
      }
      TRAINRT_REQUIRE(
          !pins_->recompute.has_value() ||
              (*pins_->recompute == stage.recompute && stage.recompute_runs.empty()),
          kInvalidArgument,
          "--recompute ",
          recompute_name(pins_->recompute.value_or(RecomputeMode::kNone)),
          " contradicts ",
          where_,
          ", where stage ",
          stage.virtual_stage,
          " has ",
          stage.recompute_runs.empty() ? recompute_name(stage.recompute) : "several kinds of it",
          "; leave out one of them");
    }
    pins_->stage_recompute = stated_.count("stages.recompute") != 0;
    if (pins_->stage_recompute) {
      pins_->recompute = least;  // each stage keeps its own
    }
  }

  void pin_shares() {
    if (plan_.shares.empty()) {
      return;
    }
    TRAINRT_REQUIRE(pins_->shares.empty(),
                    kInvalidArgument,
                    "--shares contradicts ",
                    where_,
                    ", which says how many samples each data rank has; leave out one of them");
    const int count = static_cast<int>(plan_.shares.size());
    imply("data ranks", "the shares", pins_->data, count);
    int64_t samples = 0, largest = 0;
    std::set<int> ranks;
    for (const DataShare& share : plan_.shares) {
      samples += share.num_samples;
      largest = std::max(largest, share.micro_batch_size);
      TRAINRT_REQUIRE(
          share.data_rank >= 0 && share.data_rank < count && ranks.insert(share.data_rank).second,
          kInvalidArgument,
          where_,
          ": data rank ",
          share.data_rank,
          ranks.count(share.data_rank) != 0 ? " has two shares" : " is not below their number");
    }
    TRAINRT_REQUIRE(plan_.global_batch == 0 || samples == plan_.global_batch,
                    kInvalidArgument,
                    where_,
                    ": the shares add up to ",
                    samples,
                    " samples, ",
                    std::abs(samples - plan_.global_batch),
                    samples > plan_.global_batch ? " more" : " fewer",
                    " than the global batch of ",
                    plan_.global_batch);
    TRAINRT_REQUIRE(!pins_->micro_batch.has_value() || *pins_->micro_batch == largest,
                    kInvalidArgument,
                    where_,
                    ": the largest micro-batch of the shares has ",
                    largest,
                    " samples, and a micro-batch size of ",
                    pins_->micro_batch.value_or(0),
                    " is wanted");
    pins_->micro_batch = largest;
    pins_->data_shares = plan_.shares;
    std::sort(pins_->data_shares.begin(),
              pins_->data_shares.end(),
              [](const DataShare& a, const DataShare& b) { return a.data_rank < b.data_rank; });
  }

  int find_device(const PlanDevice& wanted) const {
    std::vector<std::string> names;
    for (int d = 0; d < topology_.num_devices(); ++d) {
      if (topology_.host_of(d).name == wanted.host && topology_.device(d).name == wanted.device) {
        return d;
      }
      names.push_back(topology_.host_of(d).name + "/" + topology_.device(d).name);
    }
    const std::string name = wanted.host + "/" + wanted.device;
    TRAINRT_FAIL(kInvalidArgument,
                 where_,
                 ": rank ",
                 wanted.rank,
                 " is on ",
                 name,
                 ", which the cluster of ",
                 topology_.hosts.size(),
                 " hosts and ",
                 topology_.num_devices(),
                 " devices does not have",
                 did_you_mean(name, names));
  }

  void pin_devices() {
    if (plan_.devices.empty()) {
      return;
    }
    const int count = static_cast<int>(plan_.devices.size());
    TRAINRT_REQUIRE(count <= topology_.num_devices(),
                    kInvalidArgument,
                    where_,
                    " lists ",
                    count,
                    " devices, ",
                    count - topology_.num_devices(),
                    " more than the cluster has; leave its devices out, or name the cluster it is "
                    "for with --cluster");
    std::vector<int> order(static_cast<size_t>(count), -1);
    // That each rank has one device of its own, plan_from_json() has seen to.
    for (const PlanDevice& device : plan_.devices) {
      order.at(static_cast<size_t>(device.rank)) = find_device(device);
    }
    if (pins_->data && pins_->tensor && pins_->pipeline) {
      const int world = *pins_->data * *pins_->tensor * *pins_->pipeline;
      TRAINRT_REQUIRE(world == count,
                      kInvalidArgument,
                      where_,
                      " lists ",
                      count,
                      " devices, and dp ",
                      *pins_->data,
                      " x tp ",
                      *pins_->tensor,
                      " x pp ",
                      *pins_->pipeline,
                      " are ",
                      world,
                      " ranks");
    }
    pins_->devices = plan_.devices;
    pins_->device_order = std::move(order);
  }

  void check_placements() {
    for (const auto& [name, placement] : plan_.placements) {
      TRAINRT_REQUIRE(placement.data.kind != Placement::Kind::kPartial &&
                          placement.tensor.kind != Placement::Kind::kPartial,
                      kInvalidArgument,
                      where_,
                      ": '",
                      name,
                      "' is placed partial, which only what is computed can be; wanted shard(d) or "
                      "replicate");
      TRAINRT_REQUIRE(
          placement.data.kind == Placement::Kind::kReplicate || pins_->zero_stage.value_or(3) == 3,
          kInvalidArgument,
          where_,
          ": '",
          name,
          "' is cut over data ranks, which zero_stage 3 does; it is ",
          pins_->zero_stage.value_or(0));
      if (placement.data.kind == Placement::Kind::kShard) {
        TRAINRT_REQUIRE(placement.data.dim == 0,
                        kInvalidArgument,
                        where_,
                        ": '",
                        name,
                        "' is placed ",
                        placement_string(placement.data),
                        " over data ranks; ZeRO cuts along dim 0");
        pins_->zero_stage = 3;
      }
      TRAINRT_REQUIRE(
          placement.tensor.kind == Placement::Kind::kReplicate || pins_->tensor.value_or(2) > 1,
          kInvalidArgument,
          where_,
          ": '",
          name,
          "' is placed ",
          placement_string(placement.tensor),
          " over the tensor group, which has 1 rank");
    }
  }

  const Plan& plan_;
  const std::set<std::string>& stated_;
  const std::string& where_;
  const Topology& topology_;
  PlanPins* pins_;
};

void check_names(const std::string& where,
                 const char* what,
                 const std::string& name,
                 bool known,
                 const std::vector<std::string>& names) {
  TRAINRT_REQUIRE(known,
                  kInvalidArgument,
                  where,
                  ": ",
                  what,
                  " names '",
                  name,
                  "', which the model does not have",
                  did_you_mean(name, names));
}

}  // namespace

BlockPins PlanPins::block_pins() const {
  BlockPins result;
  for (size_t s = 1; s < stages.size(); ++s) {
    result.cuts.push_back(stages[s].first_node);
  }
  for (const auto& [name, placement] : placements) {
    result.placements[name] = placement.tensor;
  }
  result.padding = padding;
  return result;
}

bool PlanPins::splits_tensors() const {
  return std::any_of(placements.begin(), placements.end(), [](const auto& entry) {
    return entry.second.tensor.kind == Placement::Kind::kShard;
  });
}

std::set<std::string> stated_plan_keys(const std::string& json) {
  std::set<std::string> keys;
  const nlohmann::json object = nlohmann::json::parse(json);
  for (const auto& [key, value] : object.items()) {
    if (!value.is_null()) {
      keys.insert(key);
    }
  }
  for (const auto& stage : object.value("stages", nlohmann::json::array())) {
    if (stage.contains("recompute")) {
      keys.insert("stages.recompute");
    }
  }
  return keys;
}

void pin_plan(const Plan& plan,
              const std::set<std::string>& stated,
              const std::string& where,
              const Topology& topology,
              PlanPins* pins) {
  Pinner(plan, stated, where, topology, pins).run();
}

namespace {

// A prime of which no dim is a multiple: with it, what can be padded is.
bool can_be_padded(const Graph& graph, const Node& node) {
  return node_padding(OpContext(graph, node), 1000003).any;
}

}  // namespace

void check_model_pins(const PlanPins& pins, const Graph& graph, int num_nodes) {
  std::vector<std::string> node_names, value_names;
  std::map<std::string, const Node*> nodes;
  std::map<std::string, const Value*> values;
  for (const Node& node : graph.nodes()) {
    num_nodes = std::max(num_nodes, node.source_index + 1);
    nodes.emplace(node.name, &node);
  }
  for (const Value& value : graph.values()) {
    values.emplace(value.name, &value);
  }
  if (!pins.stages.empty()) {
    const int last = pins.stages.back().last_node;
    TRAINRT_REQUIRE(last < num_nodes,
                    kInvalidArgument,
                    pins.from,
                    ": the last stage ends with node ",
                    last,
                    ", and the model's last node is ",
                    num_nodes - 1,
                    ": ",
                    last - num_nodes + 1,
                    " too many");
  }
  for (const auto& [name, node] : nodes) {
    node_names.push_back(name);
  }
  for (const PlanStage& stage : pins.stages) {
    for (const std::string& name : stage.recompute_nodes) {
      check_names(pins.from, "recompute.nodes", name, nodes.count(name) != 0, node_names);
    }
  }
  for (const auto& [name, multiple] : pins.padding) {
    // A node that is run again has a name of its own.
    constexpr const char* kAgain = "/recompute";
    const std::string node =
        name.ends_with(kAgain) ? name.substr(0, name.size() - std::string(kAgain).size()) : name;
    check_names(pins.from, "padding", name, nodes.count(node) != 0, node_names);
    const Node& padded = *nodes.at(node);
    TRAINRT_REQUIRE(can_be_padded(graph, padded),
                    kInvalidArgument,
                    pins.from,
                    ": padding names '",
                    name,
                    "', a ",
                    padded.op_type,
                    ", which cannot be padded; wanted matrix products or convolutions");
  }
  for (const auto& [name, placement] : pins.placements) {
    const auto found = values.find(name);
    if (found == values.end()) {
      for (const auto& [known, value] : values) {
        value_names.push_back(known);
      }
    }
    check_names(pins.from, "placements", name, found != values.end(), value_names);
    const Shape& shape = found->second->type.shape;
    for (const Placement& side : {placement.data, placement.tensor}) {
      TRAINRT_REQUIRE(side.kind != Placement::Kind::kShard ||
                          (side.dim >= 0 && side.dim < static_cast<int>(shape.size())),
                      kInvalidArgument,
                      pins.from,
                      ": '",
                      name,
                      "' is placed ",
                      placement_string(side),
                      ", but its shape is ",
                      shape_string(shape));
    }
    if (placement.tensor.kind == Placement::Kind::kShard && pins.tensor.has_value()) {
      const int64_t size = shape[static_cast<size_t>(placement.tensor.dim)];
      TRAINRT_REQUIRE(size >= *pins.tensor,
                      kInvalidArgument,
                      pins.from,
                      ": '",
                      name,
                      "' is placed ",
                      placement_string(placement.tensor),
                      ", a dim of ",
                      size,
                      " elements, over ",
                      *pins.tensor,
                      " tensor ranks");
    }
  }
}

std::vector<RecomputeMode> pinned_recompute(const PlanPins& pins,
                                            const std::vector<int>& last_source) {
  std::vector<RecomputeMode> modes;
  if (!pins.stage_recompute || pins.stages.empty()) {
    return modes;
  }
  size_t stage = 0;
  for (const int last : last_source) {
    while (stage + 1 < pins.stages.size() && last >= pins.stages[stage + 1].first_node) {
      ++stage;
    }
    modes.push_back(pins.stages[stage].recompute_of(last));
  }
  const bool alike = std::all_of(
      modes.begin(), modes.end(), [&](RecomputeMode mode) { return mode == pins.recompute; });
  return alike ? std::vector<RecomputeMode>{} : modes;
}

std::vector<int> pinned_cuts(const PlanPins& pins, const std::vector<int>& last_source) {
  std::vector<int> first_block;
  for (const PlanStage& stage : pins.stages) {
    const auto first = std::lower_bound(last_source.begin(), last_source.end(), stage.first_node);
    const int block = first_block.empty() ? 0 : static_cast<int>(first - last_source.begin());
    TRAINRT_REQUIRE(
        first_block.empty() || (block > first_block.back() && first != last_source.end()),
        kInvalidArgument,
        pins.from,
        ": stage ",
        first != last_source.end() ? stage.virtual_stage - 1 : stage.virtual_stage,
        " holds no operator that is left after constants are folded; begin stage ",
        stage.virtual_stage,
        first != last_source.end() ? " later than node " : " earlier than node ",
        stage.first_node);
    first_block.push_back(block);
  }
  return first_block;
}

void take_shares(const std::vector<DataShare>& shares, const PlanPins& pins, Layout* layout) {
  Plan plan;
  plan.data_parallel = static_cast<int>(shares.size());
  plan.shares = shares;
  plan.exact_reduction = pins.exact_reduction;
  plan.logical_shards = pins.logical_shards;
  for (const DataShare& share : plan.shares) {
    plan.global_batch += share.num_samples;
  }
  layout->num_micro_batches.clear();
  layout->micro_batch_scales.clear();
  layout->last_micro_batch = 1;
  bool full = true;
  for (const DataShare& share : plan.shares) {
    std::vector<int64_t> sizes;
    if (plan.exact_reduction) {  // logical shards may differ by a sample
      for (const MicroBatchCut& cut : cut_micro_batches(plan, share.data_rank)) {
        sizes.push_back(cut.num_samples);
      }
    } else {
      for (int64_t left = share.num_samples; left > 0; left -= sizes.back()) {
        sizes.push_back(std::min(left, share.micro_batch_size));
      }
    }
    const int64_t whole = layout->micro_batch_size(share.data_rank);
    std::vector<double>& scales = layout->micro_batch_scales.emplace_back();
    if (std::any_of(sizes.begin(), sizes.end(), [&](int64_t size) { return size != whole; })) {
      full = false;
      for (const int64_t size : sizes) {
        scales.push_back(static_cast<double>(size) / static_cast<double>(whole));
      }
    }
    layout->num_micro_batches.push_back(static_cast<int>(sizes.size()));
  }
  const std::vector<int>& counts = layout->num_micro_batches;
  if (full && std::all_of(counts.begin(), counts.end(), [&](int n) { return n == counts[0]; })) {
    layout->num_micro_batches.resize(1);
  }
  if (full) {
    layout->micro_batch_scales.clear();
  }
}

}  // namespace trainrt
