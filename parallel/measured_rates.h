// What `trainrt profile` has measured, as a cluster file has it.
#pragma once

#include "parallel/topology.h"
#include "parallel/yaml_reader.h"

namespace trainrt {

// Of a device: streams: [[working set, bytes/s], ...], ascending, and kernels: {NAME: [[batch, m,
// n, k, bytes, seconds], ...]}. Throws kInvalidArgument, as read_calls() does.
void read_samples(const YamlReader& reader, const YAML::Node& node, DeviceType* type);

// Of a host's `intra`: wake_seconds, measured_ranks and calls: {NAME: [[bytes, seconds], ...]}.
void read_calls(const YamlReader& reader, const YAML::Node& node, LinkType* link);

}  // namespace trainrt
