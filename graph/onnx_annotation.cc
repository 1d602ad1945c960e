#include "graph/onnx_annotation.h"

#include <algorithm>
#include <filesystem>

#include "graph/onnx_model.h"
#include "graph/onnx_tensor.h"
#include "graph/onnx_write_file.h"

namespace trainrt {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kFirstAnnotatedIr = 11;

// A shard held by several devices is written as a group: a number beyond the devices' own.
void write_devices(const AnnotatedTensor& tensor, int num_devices, onnx::ShardingSpecProto& spec) {
  int64_t next_group = num_devices;
  for (const std::vector<int64_t>& group : tensor.devices) {
    if (tensor.cuts.empty()) {
      for (const int64_t device : group) {
        spec.add_device(device);
      }
    } else if (group.size() == 1) {
      spec.add_device(group[0]);
    } else {
      onnx::IntIntListEntryProto* entry = spec.add_index_to_device_group_map();
      entry->set_key(next_group);
      for (const int64_t device : group) {
        entry->add_value(device);
      }
      spec.add_device(next_group++);
    }
  }
}

void write_node(const AnnotatedNode& node,
                const DeviceAnnotation& annotation,
                onnx::NodeDeviceConfigurationProto& proto) {
  proto.set_configuration_id(annotation.name);
  if (node.pipeline_stage) {
    proto.set_pipeline_stage(*node.pipeline_stage);
  }
  for (const AnnotatedTensor& tensor : node.tensors) {
    onnx::ShardingSpecProto& spec = *proto.add_sharding_spec();
    spec.set_tensor_name(tensor.name);
    write_devices(tensor, annotation.num_devices, spec);
    for (const AnnotatedCut& cut : tensor.cuts) {
      onnx::ShardedDimProto& dim = *spec.add_sharded_dim();
      dim.set_axis(cut.axis);
      dim.add_simple_sharding()->set_num_shards(cut.num_shards);
    }
  }
}

template <typename Items, typename Matches>
void erase_if(Items& items, Matches&& matches) {
  for (int i = items.size(); i-- > 0;) {
    if (matches(items.Get(i))) {
      items.DeleteSubrange(i, 1);
    }
  }
}

// Weights beside the model stay where they are, so the annotated file has to lie beside them too.
void check_folder(const OnnxModel::Impl& model, const std::string& path) {
  for (const onnx::TensorProto& tensor : model.graph().initializer()) {
    if (!has_external_data(tensor)) {
      continue;
    }
    for (const onnx::StringStringEntryProto& entry : tensor.external_data()) {
      std::error_code error;
      const fs::path weights = fs::path(model.files.folder) / entry.value();
      TRAINRT_REQUIRE(
          entry.key() != "location" || !fs::exists(weights, error) ||
              fs::equivalent(
                  fs::absolute(path).parent_path(), fs::absolute(model.path).parent_path(), error),
          kInvalidArgument,
          "--annotate '",
          path,
          "': the model's weights lie in '",
          weights.string(),
          "', and references to them are relative; write to the model's folder");
    }
  }
}

}  // namespace

std::vector<std::vector<std::string>> node_tensors(const OnnxModel& model) {
  std::vector<std::vector<std::string>> tensors;
  for (const onnx::NodeProto& node : model.impl().graph().node()) {
    std::vector<std::string>& names = tensors.emplace_back();
    for (const auto* list : {&node.input(), &node.output()}) {
      for (const std::string& name : *list) {
        if (!name.empty() && std::find(names.begin(), names.end(), name) == names.end()) {
          names.push_back(name);
        }
      }
    }
  }
  return tensors;
}

void write_annotated(const OnnxModel& model,
                     const DeviceAnnotation& annotation,
                     const std::string& path) {
  check_folder(model.impl(), path);
  onnx::ModelProto proto = *model.impl().proto;
  attach_weights(*proto.mutable_graph(), model.impl().files.model);
  proto.set_ir_version(std::max<int64_t>(proto.ir_version(), kFirstAnnotatedIr));
  erase_if(*proto.mutable_configuration(),
           [&](const auto& configuration) { return configuration.name() == annotation.name; });
  onnx::DeviceConfigurationProto& configuration = *proto.add_configuration();
  configuration.set_name(annotation.name);
  configuration.set_num_devices(annotation.num_devices);
  for (const std::string& device : annotation.devices) {
    configuration.add_device(device);
  }
  for (int i = 0; i < proto.graph().node_size(); ++i) {
    onnx::NodeProto& node = *proto.mutable_graph()->mutable_node(i);
    erase_if(*node.mutable_device_configurations(),
             [&](const auto& item) { return item.configuration_id() == annotation.name; });
    const auto found = annotation.nodes.find(i);
    if (found != annotation.nodes.end()) {
      write_node(found->second, annotation, *node.add_device_configurations());
    }
  }
  set_metadata(proto, annotation.metadata);
  write_model_file(proto, path);
}

namespace {

AnnotatedTensor read_tensor(const onnx::ShardingSpecProto& spec, int num_devices) {
  AnnotatedTensor tensor;
  tensor.name = spec.tensor_name();
  int64_t num_shards = 1;
  for (const onnx::ShardedDimProto& dim : spec.sharded_dim()) {
    AnnotatedCut cut{static_cast<int>(dim.axis()), 1};
    for (const onnx::SimpleShardedDimProto& part : dim.simple_sharding()) {
      TRAINRT_REQUIRE(part.num_shards() >= 1,
                      kInvalidModel,
                      "the sharding of '",
                      tensor.name,
                      "' has ",
                      part.num_shards(),
                      " shards along axis ",
                      cut.axis);
      cut.num_shards *= part.num_shards();
    }
    num_shards *= cut.num_shards;
    tensor.cuts.push_back(cut);
  }
  std::map<int64_t, std::vector<int64_t>> groups;
  for (const onnx::IntIntListEntryProto& entry : spec.index_to_device_group_map()) {
    groups[entry.key()].assign(entry.value().begin(), entry.value().end());
  }
  for (const int64_t device : spec.device()) {
    const auto group = groups.find(device);
    const std::vector<int64_t> members =
        group == groups.end() ? std::vector<int64_t>{device} : group->second;
    for (const int64_t member : members) {
      TRAINRT_REQUIRE(member >= 0 && member < num_devices,
                      kInvalidModel,
                      "the sharding of '",
                      tensor.name,
                      "' names device ",
                      member,
                      "; the configuration has ",
                      num_devices);
    }
    if (tensor.cuts.empty() && !tensor.devices.empty()) {
      tensor.devices[0].insert(tensor.devices[0].end(), members.begin(), members.end());
    } else {
      tensor.devices.push_back(members);
    }
  }
  TRAINRT_REQUIRE(tensor.cuts.empty() || static_cast<int64_t>(tensor.devices.size()) == num_shards,
                  kInvalidModel,
                  "the sharding of '",
                  tensor.name,
                  "' cuts it into ",
                  num_shards,
                  " shards and names ",
                  tensor.devices.size(),
                  " devices");
  return tensor;
}

}  // namespace

std::optional<DeviceAnnotation> read_annotation(const OnnxModel& model) {
  const onnx::ModelProto& proto = *model.impl().proto;
  if (proto.configuration_size() == 0) {
    return std::nullopt;
  }
  const onnx::DeviceConfigurationProto& configuration = proto.configuration(0);
  DeviceAnnotation annotation;
  annotation.name = configuration.name();
  annotation.num_devices = configuration.num_devices();
  annotation.devices.assign(configuration.device().begin(), configuration.device().end());
  TRAINRT_REQUIRE(annotation.num_devices >= 1 &&
                      (annotation.devices.empty() ||
                       static_cast<int>(annotation.devices.size()) == annotation.num_devices),
                  kInvalidModel,
                  "device configuration '",
                  annotation.name,
                  "' counts ",
                  annotation.num_devices,
                  " devices and names ",
                  annotation.devices.size());
  for (int i = 0; i < proto.graph().node_size(); ++i) {
    for (const auto& item : proto.graph().node(i).device_configurations()) {
      const bool known = std::any_of(
          proto.configuration().begin(), proto.configuration().end(), [&](const auto& other) {
            return other.name() == item.configuration_id();
          });
      TRAINRT_REQUIRE(known,
                      kInvalidModel,
                      "node '",
                      proto.graph().node(i).name(),
                      "' belongs to device configuration '",
                      item.configuration_id(),
                      "', which the model does not define");
      if (item.configuration_id() != annotation.name) {
        continue;
      }
      AnnotatedNode& node = annotation.nodes[i];
      if (item.has_pipeline_stage()) {
        node.pipeline_stage = item.pipeline_stage();
      }
      for (const onnx::ShardingSpecProto& spec : item.sharding_spec()) {
        node.tensors.push_back(read_tensor(spec, annotation.num_devices));
      }
    }
  }
  for (const onnx::StringStringEntryProto& entry : proto.metadata_props()) {
    annotation.metadata[entry.key()] = entry.value();
  }
  return annotation;
}

}  // namespace trainrt
