#include "parallel/plan_annotation.h"

#include <algorithm>
#include <set>

namespace trainrt {

namespace {

constexpr const char* kConfiguration = "trainrt";
constexpr const char* kPlanKey = "trainrt.plan";

// One tensor of a node on pipeline rank `stage`: cut along the data axis, the tensor axis, or both.
AnnotatedTensor annotated_tensor(const Plan& plan,
                                 const std::string& name,
                                 const TensorPlacement& placement,
                                 int stage) {
  const bool over_data = placement.data.kind == Placement::Kind::kShard && plan.data_parallel > 1;
  const bool over_tensor =
      placement.tensor.kind == Placement::Kind::kShard && plan.tensor_parallel > 1;
  AnnotatedTensor tensor{name, {}, {}};
  if (over_data) {
    tensor.cuts.push_back({placement.data.dim, plan.data_parallel});
  }
  if (over_tensor) {
    tensor.cuts.push_back({placement.tensor.dim, plan.tensor_parallel});
  }
  // Row-major over the cuts: the data axis first. An axis that does not cut joins the group.
  const int data_shards = over_data ? plan.data_parallel : 1;
  const int tensor_shards = over_tensor ? plan.tensor_parallel : 1;
  for (int d = 0; d < data_shards; ++d) {
    for (int t = 0; t < tensor_shards; ++t) {
      std::vector<int64_t>& group = tensor.devices.emplace_back();
      for (int data = 0; data < plan.data_parallel; ++data) {
        for (int rank = 0; rank < plan.tensor_parallel; ++rank) {
          if ((!over_data || data == d) && (!over_tensor || rank == t)) {
            group.push_back(rank_of(plan, {stage, data, rank}));
          }
        }
      }
    }
  }
  return tensor;
}

const PlanStage* stage_of(const Plan& plan, int node) {
  const PlanStage* found = nullptr;
  for (const PlanStage& stage : plan.stages) {
    if (stage.first_node <= node) {
      found = &stage;
    }
  }
  return found;
}

}  // namespace

DeviceAnnotation annotation_of(const Plan& plan, const OnnxModel& model) {
  DeviceAnnotation annotation;
  annotation.name = kConfiguration;
  annotation.num_devices = plan.world_size();
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    const auto device = std::find_if(plan.devices.begin(),
                                     plan.devices.end(),
                                     [&](const PlanDevice& item) { return item.rank == rank; });
    annotation.devices.push_back(device == plan.devices.end()
                                     ? concat("rank ", rank)
                                     : concat(device->host, "/", device->device));
  }
  std::map<std::string, TensorPlacement> placements = plan.placements;
  for (const ModelInput& input : model.inputs()) {
    if (input.batch_axis >= 0) {
      placements[input.name].data = Placement::shard(input.batch_axis);
    }
  }
  const std::vector<std::vector<std::string>> tensors = node_tensors(model);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const PlanStage* stage = stage_of(plan, static_cast<int>(i));
    AnnotatedNode& node = annotation.nodes[static_cast<int>(i)];
    node.pipeline_stage = stage != nullptr ? stage->virtual_stage : 0;
    for (const std::string& name : tensors[i]) {
      const auto found = placements.find(name);
      if (found != placements.end()) {
        node.tensors.push_back(
            annotated_tensor(plan, name, found->second, stage != nullptr ? stage->rank_stage : 0));
      }
    }
  }
  annotation.metadata[kPlanKey] = plan_to_json(plan);
  return annotation;
}

namespace {

std::vector<PlanStage> stages_of(const DeviceAnnotation& annotation) {
  std::vector<PlanStage> stages;
  for (const auto& [index, node] : annotation.nodes) {
    if (!node.pipeline_stage) {
      continue;
    }
    const int stage = *node.pipeline_stage;
    if (!stages.empty() && stages.back().virtual_stage == stage) {
      stages.back().last_node = index;
      continue;
    }
    const int expected = static_cast<int>(stages.size());
    TRAINRT_REQUIRE(stage == expected,
                    kInvalidModel,
                    "the model's annotations put node ",
                    index,
                    " on pipeline stage ",
                    stage,
                    " after stage ",
                    expected - 1,
                    "; stages must be consecutive runs of nodes, numbered from 0");
    PlanStage next;
    next.virtual_stage = next.rank_stage = stage;
    next.first_node = next.last_node = index;
    stages.push_back(next);
  }
  return stages;
}

// Weights that are cut say the tensor-parallel degree; all must say the same.
void read_placements(const DeviceAnnotation& annotation,
                     const std::set<std::string>& inputs,
                     Plan& plan) {
  for (const auto& [index, node] : annotation.nodes) {
    for (const AnnotatedTensor& tensor : node.tensors) {
      if (tensor.cuts.empty() || inputs.count(tensor.name) != 0) {
        continue;
      }
      const AnnotatedCut& cut = tensor.cuts.back();
      TRAINRT_REQUIRE(tensor.cuts.size() == 1 && cut.axis >= 0 &&
                          (plan.tensor_parallel == 1 || plan.tensor_parallel == cut.num_shards),
                      kInvalidModel,
                      "the model's annotations cut '",
                      tensor.name,
                      "' into ",
                      cut.num_shards,
                      " shards",
                      tensor.cuts.size() > 1 ? " along several axes" : "",
                      "; a plan has one tensor-parallel degree",
                      plan.tensor_parallel > 1 ? concat(", here ", plan.tensor_parallel) : "");
      plan.tensor_parallel = static_cast<int>(cut.num_shards);
      plan.placements[tensor.name].tensor = Placement::shard(cut.axis);
    }
  }
}

}  // namespace

std::optional<AnnotatedPlan> plan_of_annotation(const OnnxModel& model) {
  const std::optional<DeviceAnnotation> annotation = read_annotation(model);
  if (!annotation) {
    return std::nullopt;
  }
  const auto json = annotation->metadata.find(kPlanKey);
  if (json != annotation->metadata.end() && annotation->name == kConfiguration) {
    try {
      return AnnotatedPlan{plan_from_json(json->second), true};
    } catch (Error& error) {
      error.add_context(concat("in the model's metadata '", kPlanKey, "'"));
      throw;
    }
  }
  Plan plan;
  plan.stages = stages_of(*annotation);
  plan.pipeline_parallel = std::max<int>(1, static_cast<int>(plan.stages.size()));
  std::set<std::string> inputs;
  for (const ModelInput& input : model.inputs()) {
    inputs.insert(input.name);
  }
  read_placements(*annotation, inputs, plan);
  const int model_ranks = plan.pipeline_parallel * plan.tensor_parallel;
  TRAINRT_REQUIRE(annotation->num_devices % model_ranks == 0,
                  kInvalidModel,
                  "the model's annotations have ",
                  plan.pipeline_parallel,
                  " stages of ",
                  plan.tensor_parallel,
                  " shards, which ",
                  annotation->num_devices,
                  " devices do not divide into");
  plan.data_parallel = annotation->num_devices / model_ranks;
  return AnnotatedPlan{plan, false};
}

}  // namespace trainrt
