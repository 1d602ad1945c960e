// What collectives and messages between the ranks of one host take, by size.
#pragma once

#include "parallel/communicator.h"
#include "parallel/topology.h"

namespace trainrt {

// Collective over `world`, of at least two ranks; all return the same.
LinkType time_calls(Communicator& world);

}  // namespace trainrt
