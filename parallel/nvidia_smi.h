// A host described by what nvidia-smi printed there: `nvidia-smi topo -m` for the links, and
// `nvidia-smi -q` or `nvidia-smi --query-gpu=... --format=csv` for the GPUs.
#pragma once

#include <string>
#include <vector>

#include "parallel/topology.h"

namespace trainrt {

// One GPU. `type` is the catalogue's, with the memory that the card reports and a speed below 1
// where its clock is held down (see nvidia_smi.cc).
struct SmiDevice {
  DeviceType type;
  int64_t used_bytes = 0;  // held by others and by the driver: not ours
};

struct SmiHost {
  std::vector<SmiDevice> devices;
  LinkType intra;  // the slowest between two of the GPUs: collectives run at its pace
  LinkType inter;  // the catalogue's for this kind of host
  int num_nics = 1;
};

// Whether `text` is output of one of these commands (else it is taken for a cluster file).
bool is_smi_topology(const std::string& text);
bool is_smi_query(const std::string& text);

struct SmiFile {
  std::string name;  // in messages
  std::string text;
};

// Without a `topology` (no name) links are the catalogue's for the first GPU. Throws
// kInvalidArgument: no GPU, a card that the catalogue does not have (with near names), a matrix for
// another number of GPUs, a listing without its header or without names.
SmiHost read_smi_host(const SmiFile& query, const SmiFile& topology);

}  // namespace trainrt
