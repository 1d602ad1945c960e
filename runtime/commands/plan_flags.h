// What `trainrt plan` makes of the flags that name machines and their price.
#pragma once

#include <map>
#include <string>

#include "parallel/topology.h"
#include "runtime/options.h"

namespace trainrt {

// The machines to plan for: --cluster, or CPU ranks of this one by --devices or --nproc. Throws
// kInvalidArgument for flags of which one would be passed over.
Topology planned_topology(const Options& options);

// Per device-hour, by type name, for --objective cost; empty for others. Throws kInvalidArgument
// for what is no price, for types that the cluster does not have, and for types without a price.
std::map<std::string, double> planned_prices(const Options& options, const Topology& topology);

}  // namespace trainrt
