// How users name a cluster: a YAML file (CONTRACT section 3), the saved output of `nvidia-smi -q`
// or `nvidia-smi --query-gpu=... --format=csv` (one host), or a preset such as "dgx-a100:128",
// "rtx-4090:2" or "cpu:4". A host of a YAML file may be `nvidia_smi: {query: FILE, topo: FILE}`.
#pragma once

#include <string>
#include <vector>

#include "parallel/topology.h"

namespace trainrt {

// `text` is YAML; `where` names it in messages. Throws kInvalidArgument with line, key and the way
// out for unknown keys, negative sizes, no devices and unknown types.
Topology parse_cluster(const std::string& text, const std::string& where);

// A file when one of that name exists, else a preset.
Topology load_cluster(const std::string& file_or_preset);

// "dgx-a100", "dgx-h100" ..., every catalogue device, "cpu"; each with ":N" hosts (cpu: N devices).
Topology make_preset(const std::string& preset);
std::vector<std::string> preset_names();

// "24GiB", "512 MiB", "2TiB" or a number of bytes. `where` names the key in messages.
int64_t parse_bytes(const std::string& text, const std::string& where);

}  // namespace trainrt
