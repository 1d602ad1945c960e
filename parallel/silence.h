// How long the other end of a connection has given no sign of life, though it does so at intervals
// while its process runs.
#pragma once

#include <algorithm>
#include <chrono>

#include "parallel/socket.h"

namespace trainrt {

class Silence {
 public:
  void broken() { heard_ = SteadyClock::now(); }

  // To be called in every turn of the loop that reads, after it has read. What the loop itself has
  // slept through, since its own process was stopped, is nobody's silence.
  SteadyClock::duration look() {
    const auto now = SteadyClock::now();
    if (now - looked_ > kLongestTurn) {
      heard_ = std::min(now, heard_ + (now - looked_));
    }
    looked_ = now;
    return now - heard_;
  }

 private:
  static constexpr std::chrono::seconds kLongestTurn{1};

  SteadyClock::time_point heard_ = SteadyClock::now();
  SteadyClock::time_point looked_ = heard_;
};

}  // namespace trainrt
