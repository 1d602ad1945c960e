// The devices we know figures of (parallel/data/devices.csv, built into the program), and how users
// may write their names.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/topology.h"

namespace trainrt {

struct CatalogueEntry {
  DeviceType device;
  LinkType intra;  // in the usual host
  LinkType inter;
  int devices_per_host = 1;
  int num_nics = 1;
  std::string source;
};

const std::vector<CatalogueEntry>& device_catalogue();

// Names match without regard to case, separators and vendor words, after a parenthesis is dropped;
// "a100-80gb-sxm" is "A100-SXM4-80GB". A name without a memory size means the largest listed.
std::optional<CatalogueEntry> match_device(const std::string& name);
// The same; throws kInvalidArgument with near names.
CatalogueEntry find_device(const std::string& name);

// Short names and what they stand for.
const std::vector<std::pair<std::string, std::string>>& device_aliases();

}  // namespace trainrt
