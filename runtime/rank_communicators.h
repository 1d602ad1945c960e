// The communicators of one rank, by the plan's mesh axes.
#pragma once

#include <map>
#include <string>

#include "parallel/communicator.h"

namespace trainrt {

// For numbers in host memory. Null where the axis has one rank.
struct RankCommunicators {
  Communicator* world = nullptr;
  Communicator* data = nullptr;
  Communicator* tensor = nullptr;
  Communicator* pipeline = nullptr;
  // For tensors, by the same names ("data" ...), where the others cannot read the device's memory.
  std::map<std::string, Communicator*> on_device = {};

  // The communicator that moves tensors of this mesh axis. Throws kInternal for an unknown group
  // and for one that does not exist on this rank.
  Communicator& of_tensors(const std::string& name) const;
  // Throws kCommunication when a communicator between devices has failed.
  void require_alive() const;
  // Gives up those between devices.
  void abort(const std::string& reason) const;
};

}  // namespace trainrt
