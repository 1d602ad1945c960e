// ONNX's own multi-device annotations (IR 11 and later): DeviceConfigurationProto in the model,
// NodeDeviceConfigurationProto (sharding_spec, pipeline_stage) in the nodes of its main graph.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "graph/onnx_import.h"

namespace trainrt {

// One axis of a tensor cut into equal parts.
struct AnnotatedCut {
  int axis = 0;
  int64_t num_shards = 1;
};

// Where one tensor of a node lies. `devices` lists the shards in row-major order over `cuts`; an
// entry is several devices where a shard is replicated. Without cuts: one entry, all that hold it.
struct AnnotatedTensor {
  std::string name;
  std::vector<AnnotatedCut> cuts;
  std::vector<std::vector<int64_t>> devices;
};

struct AnnotatedNode {
  std::optional<int> pipeline_stage;
  std::vector<AnnotatedTensor> tensors;
};

struct DeviceAnnotation {
  std::string name;                  // of the configuration
  std::vector<std::string> devices;  // names; may be empty in files of others
  int num_devices = 0;
  std::map<int, AnnotatedNode> nodes;  // by position in the main graph (Node::source_index)
  std::map<std::string, std::string> metadata;  // written as metadata_props
};

// The tensors that the main graph's nodes read and write, by position: inputs, then outputs.
std::vector<std::vector<std::string>> node_tensors(const OnnxModel& model);

// Writes `model` with `annotation` in place of one of the same name; everything else, weights and
// references to external weights included, stays. References are relative: `path` must lie in the
// model's folder when the model has external weights that exist. Throws kInvalidArgument, kIo.
void write_annotated(const OnnxModel& model,
                     const DeviceAnnotation& annotation,
                     const std::string& path);

// The first configuration of the model, if it has any. Throws kInvalidModel for annotations that
// contradict themselves: an unknown configuration, devices out of range, a count that does not fit
// the cuts.
std::optional<DeviceAnnotation> read_annotation(const OnnxModel& model);

}  // namespace trainrt
